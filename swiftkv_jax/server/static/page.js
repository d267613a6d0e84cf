// One prompt, every model of this server in turn: the answer as it streams, and what it cost.
// Whatever comes from a server is set as text (textContent), never as markup.
"use strict";

const byId = (id) => document.getElementById(id);
const SENTENCE = "The cache of a function keeps";
const PASSAGE = `The functions described in this section keep the results of earlier calls, so that a later call \
with the same arguments is answered from memory. A cache has a size: when it is full, the entry that was used least \
recently makes room for the new one. If the size is None, the cache can grow without bound. Entries are compared by \
equality and must be hashable; a call that raises an exception is not remembered. The counters of hits and misses \
can be read at any time, and clearing the cache sets them to zero. It is safe to use one cache from several threads, \
but the function itself may be called more than once if two threads ask for the same value before it is known.

`;
let models = []; // of /v1/models, each with its card on the page
let running = null; // the AbortController of a run

class ServerError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

async function call(path, body, signal) {
  const headers = { "Content-Type": "application/json" };
  if (byId("key").value) headers.Authorization = `Bearer ${byId("key").value}`;
  const options = body ? { method: "POST", body: JSON.stringify(body) } : {};
  const answer = await fetch(path, { headers, signal, cache: "no-store", credentials: "omit", ...options });
  if (answer.ok) return answer;
  let message = `the server answered ${answer.status}`;
  try {
    message = String((await answer.json()).error.message);
  } catch {
    // what is no error of ours has no more to say
  }
  throw new ServerError(answer.status, message);
}

function tell(error) {
  const line = byId("error");
  const text = error instanceof TypeError ? "the server cannot be reached" : error && error.message;
  line.textContent = text ? text.replace(/\s+/g, " ") : "";
  line.title = line.textContent;
  line.hidden = !text;
}

// What to say of a model: its plan decides how many layers a prompt's tokens run.
function kind(model) {
  const cache = `${model.cache_bytes_per_token.toLocaleString("en")} cache bytes a token`;
  if (model.split === null) return `standard: ${model.layers} layers; ${cache}`;
  const share = model.share > 1 ? `, ${model.share} of the others share a cache` : "";
  return `SwiftKV: prompts run ${model.split} of ${model.layers} layers${share}; ${cache}`;
}

function card(model) {
  const section = byId("card").content.cloneNode(true).firstElementChild;
  section.querySelector("h2").textContent = model.id;
  section.querySelector(".kind").textContent = kind(model);
  section.querySelector(".answer").setAttribute("aria-label", `Answer of ${model.id}`);
  return section;
}

async function connect() {
  tell(null);
  try {
    const found = (await (await call("/v1/models")).json()).data;
    models = found.map((model) => ({ ...model, card: card(model) }));
    byId("models").replaceChildren(...models.map((model) => model.card));
    const context = Math.min(...models.map((model) => model.max_model_len));
    byId("about").textContent = `${models.length > 1 ? "two models side by side" : "one model"}; context ${context} tokens`;
    await waitUntilReady();
  } catch (error) {
    byId("about").textContent = "not connected";
    byId("run").disabled = true;
    if (error.status === 401) {
      byId("key-row").hidden = false;
      byId("key").focus();
      tell(byId("key").value ? error : new Error("this server asks for an API key"));
    } else {
      tell(error);
    }
  }
}

async function waitUntilReady() {
  for (;;) {
    try {
      await call("/ready");
      byId("status").textContent = "ready";
      byId("run").disabled = false;
      return;
    } catch (error) {
      if (error.status !== 503) throw error;
      byId("run").disabled = true;
      byId("status").textContent = error.message;
      await new Promise((wake) => setTimeout(wake, 1000));
    }
  }
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

// One answer of one model: {ttft in ms, speed in tokens per second or null, prompt, tokens}.
async function ask(model, question, signal) {
  const shown = model.card.querySelector(".answer");
  shown.textContent = "";
  model.card.classList.add("busy");
  const salt = crypto.getRandomValues(new Uint32Array(2)).join("-"); // so that no prompt is found in a cache
  const body = { ...question.body, model: model.id, cache_salt: salt, stream: true, stream_options: { include_usage: true } };
  let first = 0;
  let last = 0;
  let usage = null;
  try {
    const began = performance.now();
    for await (const event of events(await call(question.path, body, signal))) {
      if (event.error) throw new ServerError(500, String(event.error.message));
      if (event.choices.length) {
        last = performance.now();
        first = first || last;
        const choice = event.choices[0];
        shown.append(choice.delta ? choice.delta.content || "" : choice.text);
        shown.scrollTop = shown.scrollHeight;
      }
      usage = event.usage || usage;
    }
    if (!usage || !first) throw new ServerError(500, `${model.id} ended without an answer`);
    const tokens = usage.completion_tokens;
    const speed = tokens > 1 && last > first ? (1000 * (tokens - 1)) / (last - first) : null;
    return { ttft: first - began, speed, prompt: usage.prompt_tokens, tokens };
  } finally {
    model.card.classList.remove("busy");
  }
}

function median(values) {
  const sorted = values.filter((value) => value !== null).sort((a, b) => a - b);
  const middle = sorted.length >> 1;
  if (!sorted.length) return null;
  return sorted.length % 2 ? sorted[middle] : (sorted[middle - 1] + sorted[middle]) / 2;
}

function digits(value) {
  return value >= 100 ? value.toFixed(0) : value.toPrecision(3);
}

function bytes(count) {
  const units = ["bytes", "KiB", "MiB", "GiB"];
  let unit = 0;
  while (count >= 1024 && unit < units.length - 1) {
    count /= 1024;
    unit += 1;
  }
  return `${unit ? digits(count) : count} ${units[unit]}`;
}

// No measurement yet: what an earlier prompt gave would be taken for this one's.
function clear() {
  for (const model of models) {
    model.runs = [];
    for (const value of model.card.querySelectorAll("dd")) value.textContent = "–";
    for (const bar of model.card.querySelectorAll(".bar i")) bar.style.width = "0";
    model.card.querySelector(".count").textContent = "";
    model.card.querySelector(".answer").textContent = "";
  }
  byId("verdict").hidden = true;
}

// Everything measured so far: values, bars against the largest, and what the second model gains.
function show() {
  const found = models.filter((model) => model.runs.length).map((model) => {
    const { prompt, tokens } = model.runs[model.runs.length - 1];
    return {
      model,
      ttft: median(model.runs.map((run) => run.ttft)),
      speed: median(model.runs.map((run) => run.speed)),
      cache: (prompt + tokens) * model.cache_bytes_per_token,
      count: `${prompt} prompt tokens, ${tokens} answered` + (model.runs.length > 1 ? `; medians of ${model.runs.length} rounds` : ""),
    };
  });
  const words = {
    ttft: (value) => (value >= 1000 ? `${(value / 1000).toFixed(2)} s` : `${digits(value)} ms`),
    speed: digits,
    cache: bytes,
  };
  for (const name of Object.keys(words)) {
    const most = Math.max(...found.map((each) => each[name] || 0));
    for (const each of found) {
      const line = each.model.card.querySelector(`.${name}`);
      line.querySelector("dd").textContent = each[name] === null ? "–" : words[name](each[name]);
      line.querySelector("i").style.width = `${most ? (100 * (each[name] || 0)) / most : 0}%`;
    }
  }
  for (const each of found) each.model.card.querySelector(".count").textContent = each.count;
  const verdict = byId("verdict");
  verdict.hidden = found.length < 2;
  if (found.length >= 2) {
    const [one, two] = found;
    const speed = one.speed && two.speed ? `, ${(two.speed / one.speed).toFixed(2)} times the tokens per second` : "";
    const cache = `, ${((two.model.cache_bytes_per_token / one.model.cache_bytes_per_token) * 100).toFixed(0)} % of the cache bytes a token`;
    verdict.textContent = `${two.model.id} against ${one.model.id}: ${(two.ttft / one.ttft).toFixed(2)} times the time to first token${speed}${cache}`;
  }
}

function question() {
  const text = byId("prompt").value;
  if (!text) throw new Error("the prompt is empty: type one, or take a sample");
  const body = { max_tokens: Number(byId("max-tokens").value), temperature: Number(byId("temperature").value), seed: 0 };
  return byId("chat").checked
    ? { path: "/v1/chat/completions", body: { ...body, messages: [{ role: "user", content: text }] } }
    : { path: "/v1/completions", body: { ...body, prompt: text } };
}

async function run() {
  if (running || byId("run").disabled) return;
  tell(null);
  running = new AbortController();
  byId("run").disabled = true;
  byId("stop").disabled = false;
  byId("models").setAttribute("aria-busy", "true");
  const status = byId("status");
  try {
    const asked = question();
    const rounds = Math.max(1, Number(byId("rounds").value) || 1);
    clear();
    for (let round = 0; round < rounds; round += 1) {
      for (const model of round % 2 ? models.toReversed() : models) {
        status.textContent = `${model.id} answers` + (rounds > 1 ? `, round ${round + 1} of ${rounds}` : "");
        model.runs.push(await ask(model, asked, running.signal));
        show();
      }
    }
    status.textContent = "done";
  } catch (error) {
    status.textContent = error.name === "AbortError" ? "stopped" : "";
    if (error.name !== "AbortError") tell(error);
  } finally {
    running = null;
    byId("run").disabled = false;
    byId("stop").disabled = true;
    byId("models").setAttribute("aria-busy", "false");
  }
}

// As many passages as fill a share of the shortest context, less room for the answer.
async function sample(share) {
  tell(null);
  if (share === 0) return setPrompt(SENTENCE);
  try {
    const context = Math.min(...models.map((model) => model.max_model_len));
    const passage = (await (await call("/tokenize", { prompt: PASSAGE, add_special_tokens: false })).json()).count;
    const room = share * context - Number(byId("max-tokens").value) * share;
    setPrompt(PASSAGE.repeat(Math.max(1, Math.floor(room / passage))) + SENTENCE);
  } catch (error) {
    tell(error);
  }
}

function setPrompt(text) {
  byId("prompt").value = text;
  measure();
}

function measure() {
  const length = byId("prompt").value.length;
  byId("size").textContent = length ? `${length.toLocaleString("en")} characters` : "";
}

byId("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  run();
});
byId("stop").addEventListener("click", () => running && running.abort());
byId("connect").addEventListener("click", connect);
byId("key").addEventListener("keydown", (event) => {
  if (event.key === "Enter") {
    event.preventDefault();
    connect();
  }
});
byId("prompt").addEventListener("input", measure);
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && running) running.abort();
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) run();
});
for (const button of document.querySelectorAll(".sample")) {
  button.addEventListener("click", () => sample(Number(button.dataset.share)));
}
connect();
