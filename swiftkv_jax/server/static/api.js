// The server's API as the page uses it.

export class ServerError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

// The Response to a GET, or to a POST where there is a body; `key` may be empty.
export async function call(path, { body, key, signal } = {}) {
  const headers = { "Content-Type": "application/json" };
  if (key) headers.Authorization = `Bearer ${key}`;
  const options = body ? { method: "POST", body: JSON.stringify(body) } : {};
  const answer = await fetch(path, { headers, signal, cache: "no-store", credentials: "omit", ...options });
  if (answer.ok) return answer;
  let message = `the server answered ${answer.status}`;
  try {
    message = String((await answer.json()).error.message);
  } catch {
    // an answer without our error object has no more to say
  }
  throw new ServerError(answer.status, message);
}

// The JSON objects of a stream of server-sent events.
async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    held += value;
    const whole = held.split("\n\n");
    held = whole.pop();
    for (const event of whole) {
      const data = event.startsWith("data: ") ? event.slice(6) : "";
      if (data && data !== "[DONE]") yield JSON.parse(data);
    }
  }
}

// Streams one answer; each piece of text goes to `show`. Returns {ttft in ms, speed in tokens per second or null,
// prompt, tokens}.
export async function stream(path, { body, key, signal }, show) {
  const asked = { ...body, stream: true, stream_options: { include_usage: true } };
  let first = 0;
  let last = 0;
  let usage = null;
  const began = performance.now();
  for await (const event of events(await call(path, { body: asked, key, signal }))) {
    if (event.error) throw new ServerError(500, String(event.error.message));
    if (event.choices.length) {
      last = performance.now();
      first = first || last;
      const choice = event.choices[0];
      show(choice.delta ? choice.delta.content || "" : choice.text);
    }
    usage = event.usage || usage;
  }
  if (!usage || !first) throw new ServerError(500, `${body.model} ended without an answer`);
  const tokens = usage.completion_tokens;
  const speed = tokens > 1 && last > first ? (1000 * (tokens - 1)) / (last - first) : null;
  return { ttft: first - began, speed, prompt: usage.prompt_tokens, tokens };
}
