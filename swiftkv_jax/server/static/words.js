// Numbers as words. Nothing here knows the page.

const SAME = 1.05; // ratios nearer to 1 than this are noise

export function median(values) {
  const sorted = values.filter((value) => value !== null).sort((a, b) => a - b);
  const middle = sorted.length >> 1;
  if (!sorted.length) return null;
  return sorted.length % 2 ? sorted[middle] : (sorted[middle - 1] + sorted[middle]) / 2;
}

export function digits(value) {
  return value >= 100 ? value.toFixed(0) : value.toPrecision(3);
}

export function seconds(ms) {
  return ms >= 1000 ? `${(ms / 1000).toFixed(2)} s` : `${digits(ms)} ms`;
}

export function bytes(count) {
  const units = ["bytes", "KiB", "MiB", "GiB"];
  let unit = 0;
  while (count >= 1024 && unit < units.length - 1) {
    count /= 1024;
    unit += 1;
  }
  return `${unit ? digits(count) : count} ${units[unit]}`;
}

// "2.1 times faster", "1.3 times slower" or "as fast": `one` and `two` are rates, and it speaks of `two`.
export function faster(one, two) {
  const ratio = two / one;
  if (ratio < SAME && ratio > 1 / SAME) return "as fast";
  const times = ratio > 1 ? ratio : 1 / ratio;
  return `${times < 10 ? times.toFixed(times < 1.1 ? 2 : 1) : times.toFixed(0)} times ${ratio > 1 ? "faster" : "slower"}`;
}

function firstToken(one, two) {
  const how = faster(1 / one.ttft, 1 / two.ttft);
  const than = how === "as fast" ? "as" : "than";
  return `${two.name} is ${how} to the first token ${than} ${one.name} (${seconds(two.ttft)} against ${seconds(one.ttft)})`;
}

// What a measurement says, as a sentence. `found`: of each model {name, ttft, speed, bytes}, with `bytes` the cache's
// a token; `where` is put first.
export function verdict(found, where = "") {
  const begin = where ? `${where}, ` : "";
  const [one, two] = found;
  if (!two) {
    const speed = one.speed ? `, then ${digits(one.speed)} tokens per second` : "";
    return `${begin}${one.name} gives the first token after ${seconds(one.ttft)}${speed}.`;
  }
  const parts = [begin + firstToken(one, two)];
  if (one.speed && two.speed) parts.push(`generates ${faster(one.speed, two.speed)}`);
  const share = Math.round((100 * two.bytes) / one.bytes);
  if (one.bytes && two.bytes) parts.push(share === 100 ? "takes as much cache" : `takes ${share} % of the cache`);
  const last = parts.length > 1 ? ` and ${parts.pop()}` : "";
  return `${parts.join(", ")}${last}.`;
}

// A command for a POSIX shell. The key is a variable of the shell's, never the key itself.
export function curl(url, body, keyed) {
  const data = JSON.stringify(body).replaceAll("'", "'\\''");
  const key = keyed ? ` \\\n    -H "Authorization: Bearer $SWIFTKV_API_KEY"` : "";
  return `curl ${url} -H 'Content-Type: application/json'${key} \\\n    -d '${data}'`;
}

// Prompt lengths of a sweep, in tokens, for a context: the shortest first.
export function lengths(context) {
  return [1 / 16, 1 / 8, 1 / 4, 1 / 2, 0.9].map((share) => Math.max(1, Math.floor(share * context)));
}

// The least of 1, 2, 5, 10, 20, ... that cuts [0, most] into at most `parts`.
export function tick(most, parts) {
  const power = 10 ** Math.floor(Math.log10(most / parts));
  return [1, 2, 5, 10].map((step) => step * power).find((step) => most / step <= parts);
}
