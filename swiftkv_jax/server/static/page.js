// The page: one prompt, several prompt lengths, or a chat, for every model of this server in turn.
// Whatever comes from a server is set as text (textContent), never as markup.
import { call, stream } from "/api.js";
import { draw } from "/plot.js";
import { bytes, curl, digits, faster, lengths, median, seconds, verdict } from "/words.js";

const byId = (id) => document.getElementById(id);
const SENTENCE = "The cache of a function keeps";
const PASSAGE = `The functions described in this section keep the results of earlier calls, so that a later call \
with the same arguments is answered from memory. A cache has a size: when it is full, the entry that was used least \
recently makes room for the new one. If the size is None, the cache can grow without bound. Entries are compared by \
equality and must be hashable; a call that raises an exception is not remembered. The counters of hits and misses \
can be read at any time, and clearing the cache sets them to zero. It is safe to use one cache from several threads, \
but the function itself may be called more than once if two threads ask for the same value before it is known.

`;
const COMPLETIONS = "/v1/completions";
const CHAT = "/v1/chat/completions";
let models = []; // of /v1/models; each with its card on the page, its runs, and the turns of its chat
let running = null; // the AbortController of what runs
let swept = []; // of each prompt length {length, runs: of each model}

// ---- connecting ----------------------------------------------------------------------------------

const ask = (path, options = {}) => call(path, { key: byId("key").value, ...options });

function tell(error) {
  const line = byId("error");
  const text = error instanceof TypeError ? "the server cannot be reached" : error && error.message;
  line.textContent = text ? text.replace(/\s+/g, " ") : "";
  line.title = line.textContent;
  line.hidden = !text;
}

// What to say of a model: its plan decides how many layers a prompt's tokens run.
function kind(model) {
  const cache = `${model.cache_bytes_per_token.toLocaleString("en")} cache bytes per token`;
  if (model.split === null) return `standard: ${model.layers} layers; ${cache}`;
  const share = model.share > 1 ? `, ${model.share} of the others share a cache` : "";
  return `SwiftKV: prompts run ${model.split} of ${model.layers} layers${share}; ${cache}`;
}

function card(model) {
  const section = byId("card").content.cloneNode(true).firstElementChild;
  section.querySelector("h2").textContent = model.id;
  section.querySelector(".kind").textContent = kind(model);
  section.querySelector(".answer").setAttribute("aria-label", `Answer of ${model.id}`);
  section.querySelector(".turns").setAttribute("aria-label", `Chat with ${model.id}`);
  return section;
}

const context = () => Math.min(...models.map((model) => model.max_model_len));

async function connect() {
  tell(null);
  try {
    const found = (await (await ask("/v1/models")).json()).data;
    models = found.map((model) => ({ ...model, card: card(model), runs: [], turns: [] }));
    byId("models").replaceChildren(...models.map((model) => model.card));
    byId("about").textContent = `${models.length > 1 ? "two models side by side" : "one model"}; context ${context()} tokens`;
    choose();
    await untilReady();
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

const pause = (ms) => new Promise((wake) => setTimeout(wake, ms));

async function untilReady() {
  for (;;) {
    try {
      await ask("/ready");
      byId("status").textContent = "ready";
      byId("run").disabled = false;
      return;
    } catch (error) {
      if (error.status !== 503) throw error;
      byId("run").disabled = true;
      byId("status").textContent = error.message;
      await pause(1000);
    }
  }
}

// ---- modes ---------------------------------------------------------------------------------------

const MODES = {
  prompt: { button: "Run", run: measurePrompt },
  lengths: { button: "Measure", run: measureLengths },
  chat: { button: "Send", run: chat },
};

const mode = () => document.querySelector("input[name=mode]:checked").value;

// Show what belongs to the mode.
function choose() {
  const chosen = mode();
  for (const part of document.querySelectorAll("[data-modes]")) {
    part.hidden = !part.dataset.modes.split(" ").includes(chosen);
  }
  byId("run").textContent = MODES[chosen].button;
  byId("verdict").hidden = true;
  byId("sweep").hidden = chosen !== "lengths" || !swept.length;
  if (chosen === "chat") byId("ask").before(byId("results"));
  else byId("ask").after(byId("results"));
  if (chosen === "lengths") showLengths();
  if (chosen === "prompt") showPrompt();
  showCommand();
}

async function run() {
  if (running || byId("run").disabled) return;
  tell(null);
  running = new AbortController();
  byId("status").textContent = "starting";
  busy(true);
  try {
    await MODES[mode()].run(running.signal);
    byId("status").textContent = "done";
  } catch (error) {
    byId("status").textContent = error.name === "AbortError" ? "stopped" : "";
    if (error.name !== "AbortError") tell(error);
  } finally {
    running = null;
    busy(false);
  }
}

function busy(is) {
  byId("run").disabled = is;
  byId("stop").disabled = !is;
  byId("anew").disabled = is;
  byId("modes").disabled = is;
  byId("results").setAttribute("aria-busy", String(is));
}

// ---- measuring -----------------------------------------------------------------------------------

// One answer of one model, shown as it comes. No prompt is found in a cache, unless `salt` is an earlier one's.
async function answer(model, path, body, signal, show, salt = newSalt()) {
  const asked = { ...body, model: model.id, cache_salt: salt };
  model.card.classList.add("busy");
  try {
    return await stream(path, { body: asked, key: byId("key").value, signal }, show);
  } finally {
    model.card.classList.remove("busy");
  }
}

const newSalt = () => crypto.getRandomValues(new Uint32Array(2)).join("-");

// Wait until the server has compiled all that it compiles ahead of use.
async function untilWarm(signal) {
  while (!(await (await ask("/ready", { signal })).json()).warm) {
    byId("status").textContent = "waiting until the server has compiled its programs: compiling is not timed";
    await pause(500);
    signal.throwIfAborted();
  }
}

// `body` to all models in turn, once for each round and once uncounted; `each(i, run)` gets what model i took.
async function rounds(bodies, signal, each, said = "", show = () => () => {}) {
  for (const [i, model] of models.entries()) {
    byId("status").textContent = `${said}${model.id}: a first answer, whose time is not counted`;
    await answer(model, COMPLETIONS, bodies[i], signal, show(model));
  }
  const count = Math.max(1, Number(byId("rounds").value) || 1);
  for (let round = 0; round < count; round += 1) {
    const order = [...models.keys()];
    for (const i of round % 2 ? order.reverse() : order) {
      const of = count > 1 ? `, round ${round + 1} of ${count}` : "";
      byId("status").textContent = `${said}${models[i].id} answers${of}`;
      each(i, await answer(models[i], COMPLETIONS, bodies[i], signal, show(models[i])));
    }
  }
}

function settings() {
  return { max_tokens: Number(byId("max-tokens").value), temperature: Number(byId("temperature").value), seed: 0 };
}

const medians = (runs) => ({
  ttft: median(runs.map((run) => run.ttft)),
  speed: median(runs.map((run) => run.speed)),
});

// ---- one prompt ----------------------------------------------------------------------------------

async function measurePrompt(signal) {
  const prompt = byId("prompt").value;
  if (!prompt) throw new Error("the prompt is empty: type one, or take a sample");
  for (const model of models) {
    model.runs = [];
    model.card.querySelector(".answer").textContent = "";
  }
  showPrompt();
  await untilWarm(signal);
  const body = { ...settings(), prompt };
  const keep = (i, run) => {
    models[i].runs.push(run);
    showPrompt();
  };
  await rounds(models.map(() => body), signal, keep, "", (model) => {
    const shown = model.card.querySelector(".answer");
    shown.textContent = "";
    return (text) => append(shown, text);
  });
}

function append(shown, text) {
  shown.append(text);
  shown.scrollTop = shown.scrollHeight;
}

function count(runs) {
  const { prompt, tokens } = runs[runs.length - 1];
  return `${prompt} prompt tokens, ${tokens} answered` + (runs.length > 1 ? `; medians of ${runs.length} rounds` : "");
}

// Everything measured so far: values, bars against the largest, and what they say.
function showPrompt() {
  const found = models.map((model) => {
    const last = model.runs.at(-1);
    const cache = last ? (last.prompt + last.tokens) * model.cache_bytes_per_token : null;
    return { model, cache, ...medians(model.runs) };
  });
  for (const [name, words] of Object.entries({ ttft: seconds, speed: digits, cache: bytes })) {
    const most = Math.max(...found.map((each) => each[name] || 0));
    for (const each of found) {
      const line = each.model.card.querySelector(`.${name}`);
      line.querySelector("dd").textContent = each[name] === null ? "–" : words(each[name]);
      line.querySelector("i").style.width = `${most ? (100 * (each[name] || 0)) / most : 0}%`;
    }
  }
  for (const { card, runs } of models) card.querySelector(".count").textContent = runs.length ? count(runs) : "";
  const all = found.map(({ model, ttft, speed }) => ({ name: model.id, ttft, speed, bytes: model.cache_bytes_per_token }));
  showVerdict(all.length && all.every((each) => each.ttft !== null) ? verdict(all) : "");
}

function showVerdict(sentence) {
  byId("verdict").textContent = sentence;
  byId("verdict").hidden = !sentence;
}

// As many passages as fill a share of the shortest context, less room for the answer.
async function sample(share) {
  tell(null);
  if (share === 0) return setPrompt(SENTENCE);
  try {
    const body = { prompt: PASSAGE, add_special_tokens: false };
    const passage = (await (await ask("/tokenize", { body })).json()).count;
    const room = share * (context() - Number(byId("max-tokens").value));
    setPrompt(PASSAGE.repeat(Math.max(1, Math.floor(room / passage))) + SENTENCE);
  } catch (error) {
    tell(error);
  }
}

function setPrompt(text) {
  byId("prompt").value = text;
  typed();
}

function typed() {
  const length = byId("prompt").value.length;
  byId("size").textContent = length ? `${length.toLocaleString("en")} characters` : "";
  showCommand();
}

// ---- prompt lengths ------------------------------------------------------------------------------

async function measureLengths(signal) {
  swept = [];
  showLengths();
  await untilWarm(signal);
  const passages = await Promise.all(models.map((model) => passageOf(model, signal)));
  for (const length of lengths(context())) {
    const prompt = (ids) => Array.from({ length }, (_, i) => ids[i % ids.length]);
    const bodies = passages.map((ids) => ({ prompt: prompt(ids), max_tokens: 1, temperature: 0 }));
    const runs = models.map(() => []);
    const keep = (i, run) => runs[i].push(run);
    await rounds(bodies, signal, keep, `${length.toLocaleString("en")} tokens: `);
    swept.push({ length, ttft: runs.map((some) => medians(some).ttft) });
    showLengths();
  }
}

async function passageOf(model, signal) {
  const body = { model: model.id, prompt: PASSAGE, add_special_tokens: false };
  return (await (await ask("/tokenize", { body, signal })).json()).tokens;
}

function showLengths() {
  byId("sweep").hidden = !swept.length;
  if (!swept.length) return showVerdict("");
  const names = models.map((model) => model.id);
  const last = swept.at(-1);
  showVerdict(
    verdict(
      names.map((name, i) => ({ name, ttft: last.ttft[i] })),
      `At ${last.length.toLocaleString("en")} prompt tokens`,
    ),
  );
  byId("legend").replaceChildren(...names.map((name, i) => element("li", name, `series-${i}`)));
  drawLengths();
  const both = names.length > 1;
  const head = ["Prompt tokens", ...names, ...(both ? [`${names[1]} is`] : [])];
  byId("sweep").querySelector("thead tr").replaceChildren(...head.map((text) => column(text)));
  const rows = swept.map(({ length, ttft }) => {
    const against = both ? [faster(1 / ttft[0], 1 / ttft[1])] : [];
    const row = element("tr");
    row.append(...[length.toLocaleString("en"), ...ttft.map(seconds), ...against].map((text) => element("td", text)));
    return row;
  });
  byId("sweep").querySelector("tbody").replaceChildren(...rows);
}

function drawLengths() {
  if (byId("sweep").hidden) return;
  const series = models.map((_, i) => swept.map(({ length, ttft }) => ({ x: length, y: ttft[i] })));
  draw(byId("plot"), byId("sweep").clientWidth, series, "prompt tokens", "milliseconds");
}

function element(name, text = "", kind = "") {
  const made = document.createElement(name);
  made.textContent = text;
  if (kind) made.className = kind;
  return made;
}

function column(text) {
  const made = element("th", text);
  made.scope = "col";
  return made;
}

// ---- chat ----------------------------------------------------------------------------------------

async function chat(signal) {
  const said = byId("message").value;
  if (!said.trim()) throw new Error("the message is empty");
  byId("message").value = "";
  try {
    for (const model of models) await reply(model, said, signal);
  } catch (error) {
    if (error.name !== "AbortError") byId("message").value = said;
    throw error;
  } finally {
    showCommand();
  }
  byId("message").focus();
}

// One more turn of each side. An answer that was stopped stays as far as it came; a refused one leaves no turn.
async function reply(model, said, signal) {
  const shown = model.card.querySelector(".turns");
  const asked = turn(shown, "user", said);
  const told = turn(shown, "assistant", "");
  const messages = [...model.turns, { role: "user", content: said }];
  model.salt = model.salt || newSalt();
  byId("status").textContent = `${model.id} answers`;
  let whole = "";
  const show = (text) => {
    whole += text;
    told.textContent = whole.trimStart();
    shown.scrollTop = shown.scrollHeight;
  };
  try {
    await answer(model, CHAT, { ...settings(), messages }, signal, show, model.salt);
  } finally {
    if (whole) model.turns = [...messages, { role: "assistant", content: whole }];
    else for (const gone of [asked, told]) gone.remove();
  }
}

function turn(shown, role, text) {
  const made = element("p", text, `turn ${role}`);
  shown.append(made);
  return made;
}

function newChat() {
  for (const model of models) {
    model.turns = [];
    model.salt = "";
    model.card.querySelector(".turns").replaceChildren();
  }
  byId("message").focus();
  showCommand();
}

// ---- curl ----------------------------------------------------------------------------------------

function showCommand() {
  if (!models.length) return;
  const body = { model: models[0].id, ...settings() };
  const said = { role: "user", content: byId("message").value || "What is a list?" };
  const chats = mode() === "chat";
  if (chats) body.messages = [...models[0].turns, said];
  else body.prompt = byId("prompt").value || SENTENCE;
  const url = location.origin + (chats ? CHAT : COMPLETIONS);
  byId("command").textContent = curl(url, body, Boolean(byId("key").value));
  byId("copied").textContent = "";
}

async function copy() {
  const command = byId("command");
  try {
    await navigator.clipboard.writeText(command.textContent);
    byId("copied").textContent = "copied";
  } catch {
    // browsers allow this on localhost and over https only
    getSelection().selectAllChildren(command);
    byId("copied").textContent = "selected: press Ctrl+C";
  }
}

// ---- events --------------------------------------------------------------------------------------

byId("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  run();
});
byId("stop").addEventListener("click", () => running && running.abort());
byId("anew").addEventListener("click", newChat);
byId("copy").addEventListener("click", copy);
byId("connect").addEventListener("click", connect);
byId("modes").addEventListener("change", choose);
byId("key").addEventListener("keydown", (event) => {
  if (event.key === "Enter") connect();
});
byId("prompt").addEventListener("input", typed);
for (const id of ["message", "max-tokens", "temperature"]) byId(id).addEventListener("input", showCommand);
byId("message").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  run();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && running) running.abort();
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) run();
});
for (const button of document.querySelectorAll(".sample")) {
  button.addEventListener("click", () => sample(Number(button.dataset.share)));
}
window.addEventListener("resize", drawLengths);
connect();
