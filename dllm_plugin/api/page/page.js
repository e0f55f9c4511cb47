"use strict";
// The page: what is asked, by whom it is answered, and which answer is shown.

const field = (id) => document.getElementById(id);
const facts = JSON.parse(field("facts").textContent);
const turns = [];
const texts = { ask: "", chat: "", gaps: "" };
let running = null; // what aborts the requests that run
let mode = "ask";

const player = new Player(showPlace);

/** Show which canvas of how many is painted, and whether it goes on. */
function showPlace() {
  const { turn } = player;
  const canvas = turn.canvases[turn.place];
  const last = turn.canvases[turn.newest].forward;
  const replay = field("replay");
  replay.max = String(turn.newest);
  replay.value = String(turn.place);
  const said = `forward ${canvas.forward} of ${last}`;
  replay.setAttribute("aria-valuetext", said);
  field("replayed").textContent = said;
  const plays = player.plays && turn.place < turn.newest;
  field("play").dataset.plays = String(plays);
  field("play").setAttribute("aria-label", plays ? "Pause" : "Replay");
  field("stage").dataset.state = turn.state === "done" && plays ? "replaying" : turn.state;
  showScale(Math.max(last, 1));
  field("pace").textContent = paceOf(turn);
  showNumbers(field("numbers"), turn.numbers);
}

/** Name the ends of the scale. */
function showScale(last) {
  const certain = player.tone === "confidence";
  field("scale-low").textContent = certain ? "confidence 0" : "forward 1";
  field("scale-high").textContent = certain ? "1" : String(last);
}

/** Describe how long a run took, and how much slower it is shown; nothing while it runs. */
function paceOf(turn) {
  const took = turn.numbers.time;
  if (turn.state !== "done" || took === undefined || turn.newest < 2) return "";
  const shown = (delayOf(turn.newest, player.speed) * turn.newest) / 1000;
  if (shown <= Number.parseFloat(took)) return `Took ${took}.`;
  return `Took ${took}, shown in about ${shown.toFixed(shown < 3 ? 1 : 0)} s.`;
}

/** Make a turn the one that the player shows. */
function select(turn) {
  for (const other of turns) other.element.classList.toggle("current", other === turn);
  field("player").hidden = false;
  player.open(turn);
}

/** Add a turn to the stage; only a chat keeps those before. */
function addTurn(asked) {
  const turn = new Turn(asked, facts.hidden);
  turn.mode = mode;
  const holder = field("turns");
  if (!turns.every((other) => other.mode === "chat" && mode === "chat")) turns.length = 0;
  if (turns.length === 0) holder.replaceChildren();
  turns.push(turn);
  holder.append(turn.element);
  turn.part("again").addEventListener("click", () => select(turn));
  select(turn);
  bringIntoView(turn);
  return turn;
}

/** Scroll to a new turn, in a chat and where the stage is below what was asked. */
function bringIntoView(turn) {
  const box = field("stage").getBoundingClientRect();
  if (mode === "chat") turn.element.scrollIntoView({ block: "nearest" });
  if (box.top > innerHeight / 2) field("stage").scrollIntoView({ block: "start" });
}

/** Return what takes the parts of an answer as they come. */
function into(turn) {
  return {
    frame(frame) {
      turn.add(frame);
      if (player.turn === turn) player.schedule();
    },
    text(piece) {
      turn.text += piece;
    },
    numbers(numbers) {
      turn.numbers = numbers;
      if (player.turn === turn) showPlace();
    },
  };
}

/** Return this server, as the fields say. */
function ownServer() {
  return {
    own: true,
    base: new URL("v1/", document.baseURI).href,
    model: field("model").value.trim(),
    default: facts.model,
    key: field("key").value.trim(),
  };
}

/** Return the second server, or null. */
function otherServer() {
  const base = field("other-url").value.trim();
  if (!base || mode !== "ask") return null;
  return {
    own: false,
    base: base.endsWith("/") ? base : `${base}/`,
    model: field("other-model").value.trim(),
    key: field("other-key").value.trim(),
  };
}

/** Return the messages of a chat so far, and the next. */
function messagesWith(text) {
  const messages = [];
  for (const turn of mode === "chat" ? turns : []) {
    if (turn.mode !== "chat" || turn.text === "") continue;
    messages.push({ role: "user", content: turn.asked });
    messages.push({ role: "assistant", content: turn.text });
  }
  messages.push({ role: "user", content: text });
  return messages;
}

/** Return the policy and its number, as a request names them. */
function argumentsOf() {
  const named = {};
  const policy = field("policy").value;
  const threshold = field("threshold").value;
  if (policy) named.dllm_policy = policy;
  if (threshold && !field("threshold-field").hidden) named.dllm_threshold = Number(threshold);
  return Object.keys(named).length ? { vllm_xargs: named } : {};
}

/** Answer with this server. */
async function answer(text, signal) {
  const messages = messagesWith(text);
  const turn = addTurn(text);
  const refused = mode === "gaps" ? refusalOfGaps(facts) : "";
  await settle(turn, async () => {
    if (refused) throw new Refusal(refused, null);
    if (mode === "gaps") {
      const question = field("question").value.trim();
      const body = { text, ...argumentsOf() };
      if (question) body.messages = [{ role: "user", content: question }];
      return fillGaps(ownServer(), body, facts.stops, into(turn), signal);
    }
    const diffusion = { frames: true, early_text: field("early").checked };
    const most = Number(field("max-tokens").value);
    const body = { messages, max_tokens: most, diffusion, ...argumentsOf() };
    return streamAnswer(ownServer(), body, into(turn), signal);
  });
}

/** Await an answer, and show how it ended. */
async function settle(turn, answering) {
  try {
    await answering();
    turn.end("done");
    field("status").textContent = `Answer: ${turn.text}`;
  } catch (problem) {
    const stopped = problem.name === "AbortError";
    turn.end(stopped ? "stopped" : "failed");
    if (stopped) {
      turn.part("note").textContent = "Stopped.";
      field("status").textContent = "Stopped.";
    } else {
      complain(turn.part("problem"), problem);
    }
    if (player.turn === turn) player.finish();
  }
  if (player.turn === turn) player.schedule();
}

/** Show an error, and open the field that it names. */
function complain(place, problem) {
  place.textContent = problem.message;
  const named = problem.field && field(problem.field);
  if (!named) return;
  named.closest("details").open = true;
  named.setAttribute("aria-invalid", "true");
  named.focus();
}

/** Answer with the second server, as plain text. */
async function compare(server, text, signal) {
  const pane = field("other");
  pane.hidden = false;
  pane.dataset.state = "running";
  const canvas = pane.querySelector(".canvas");
  const problemPlace = pane.querySelector(".problem");
  canvas.replaceChildren();
  problemPlace.textContent = "";
  const on = {
    frame() {},
    text: (piece) => canvas.append(piece),
    numbers: (numbers) => showNumbers(pane.querySelector(".numbers"), numbers),
  };
  const messages = [{ role: "user", content: text }];
  try {
    const body = { messages, max_tokens: Number(field("max-tokens").value) };
    await streamAnswer(server, body, on, signal);
  } catch (problem) {
    if (problem.name !== "AbortError") complain(problemPlace, problem);
  }
  pane.dataset.state = "done";
}

/** Run what is asked, on one server or two. */
async function run() {
  const text = field("prompt").value.trim();
  if (running || !text) return;
  if (mode === "ask" && GAP.test(text)) {
    setMode("gaps");
    field("prompt").value = text;
  }
  for (const marked of document.querySelectorAll("[aria-invalid]")) {
    marked.removeAttribute("aria-invalid");
  }
  if (mode === "chat") field("prompt").value = "";
  running = new AbortController();
  showRunning();
  field("status").textContent = "Running.";
  const asked = [answer(text, running.signal)];
  const other = otherServer();
  field("other").hidden = other === null;
  if (other) asked.push(compare(other, text, running.signal));
  await Promise.all(asked);
  running = null;
  showRunning();
}

/** Show Stop in place of Run while requests run; the focus stays with the button. */
function showRunning() {
  const [hides, shows] = running ? ["run", "stop"] : ["stop", "run"];
  const focused = document.activeElement === field(hides);
  field(shows).hidden = false;
  field(hides).hidden = true;
  if (focused) field(shows).focus({ preventScroll: true });
}

/** Change what is asked for: one question, a chat, or gaps. */
function setMode(next) {
  texts[mode] = field("prompt").value;
  mode = next;
  document.body.dataset.mode = next;
  document.querySelector(`input[name=mode][value=${next}]`).checked = true;
  field("prompt").value = texts[next];
  field("prompt-label").textContent = OF_MODES[next].label;
  field("prompt-hint").textContent = OF_MODES[next].hint;
  const refused = next === "gaps" ? refusalOfGaps(facts) : "";
  field("gaps-notice").textContent = refused;
  field("gaps-notice").hidden = !refused;
  showExamples();
}

function showExamples() {
  const list = field("examples");
  list.replaceChildren();
  for (const { title, text, question } of EXAMPLES[mode]) {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = title;
    button.title = text;
    button.addEventListener("click", () => {
      field("prompt").value = text;
      field("question").value = question ?? "";
      run();
    });
    const item = document.createElement("li");
    item.append(button);
    list.append(item);
  }
}

/** Describe the chosen policy, and show its number if it reads one. */
function showPolicy() {
  const policy = field("policy").value || facts.policy;
  field("policy-hint").textContent = POLICIES[policy] ?? "";
  field("threshold-field").hidden = !facts.policies[policy].includes("threshold");
}

function fillMenus() {
  const menu = field("policy");
  menu.append(new Option(`${facts.policy} (default)`, ""));
  for (const name of Object.keys(facts.policies)) {
    if (name !== facts.policy) menu.append(new Option(name, name));
  }
  field("threshold").placeholder = String(facts.threshold);
  field("model").placeholder = facts.model;
  field("served-model").textContent = facts.model;
  field("served-strategy").textContent = facts.strategy;
  field("version").textContent = facts.version;
  field("docs").hidden = !facts.docs;
}

/** Clear the stage. */
function newChat() {
  if (running) return;
  turns.length = 0;
  field("turns").replaceChildren();
  field("player").hidden = true;
  player.pause();
  player.turn = null;
  field("prompt").focus();
}

function listen() {
  for (const form of document.querySelectorAll(".asks")) {
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      run();
    });
  }
  field("stop").addEventListener("click", () => running?.abort());
  field("new-chat").addEventListener("click", newChat);
  document.querySelector("main").addEventListener("keydown", (event) => {
    const typed = event.target.matches(".asks textarea, .asks input:not([type=checkbox])");
    if (event.key !== "Enter" || event.shiftKey || event.isComposing || !typed) return;
    event.preventDefault();
    run();
  });
  for (const one of document.querySelectorAll("input[name=mode]")) {
    one.addEventListener("change", () => setMode(one.value));
  }
  for (const one of document.querySelectorAll("input[name=tone]")) {
    one.addEventListener("change", () => setTone(one.value));
  }
  field("policy").addEventListener("change", showPolicy);
  field("speed").addEventListener("change", () => {
    player.speed = Number(field("speed").value);
    if (player.turn) showPlace();
  });
  field("play").addEventListener("click", () => {
    if (field("play").dataset.plays === "true") {
      player.pause();
      showPlace();
    } else {
      player.play();
    }
  });
  field("replay").addEventListener("input", () => {
    player.pause();
    player.seek(Number(field("replay").value));
  });
  for (const kind of ["pointerover", "click"]) {
    field("turns").addEventListener(kind, (event) => {
      const token = event.target.closest("[data-detail]");
      field("detail").textContent = token === null ? "" : token.dataset.detail;
    });
  }
}

/** Colour by forward or by confidence. */
function setTone(tone) {
  player.tone = tone;
  field("stage").dataset.tone = tone;
  for (const turn of turns) turn.show(turn.place, tone);
  if (player.turn) showPlace();
  else showScale("last");
}

/** Show an empty canvas before the first run. */
function showGhost() {
  for (let position = 0; position < 48; position += 1) {
    const mask = document.createElement("span");
    mask.className = "mask";
    field("ghost").append(mask);
  }
}

fillMenus();
showGhost();
showPolicy();
listen();
setTone("forward");
setMode("ask");
field("prompt").value = OMAR;
