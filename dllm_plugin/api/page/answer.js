"use strict";
// An answer on the page: its canvas after each frame, painted as chips.

/** One answer: its element, the canvas after each frame, and which of them is shown. */
class Turn {
  constructor(asked, hidden) {
    const template = document.getElementById("turn");
    this.element = template.content.firstElementChild.cloneNode(true);
    this.part("asked").firstElementChild.textContent = asked;
    this.asked = asked;
    this.hidden = new Set(hidden);
    this.canvases = [EMPTY];
    this.place = 0;
    this.text = "";
    this.numbers = {};
    this.state = "running";
  }

  part(name) {
    return this.element.querySelector(`.${name}`);
  }

  get state() {
    return this.element.dataset.state;
  }

  set state(state) {
    this.element.dataset.state = state;
  }

  get newest() {
    return this.canvases.length - 1;
  }

  add(frame) {
    this.canvases.push(applyFrame(this.canvases.at(-1), frame));
  }

  /** Show the canvas after a frame, coloured by `tone`. */
  show(place, tone) {
    this.place = place;
    const canvas = this.canvases[place];
    const holder = this.part("canvas");
    while (holder.childElementCount > canvas.length) holder.lastElementChild.remove();
    while (holder.childElementCount < canvas.length) {
      holder.append(document.createElement("span"));
    }
    const last = this.canvases[this.newest].forward;
    for (let position = 0; position < canvas.length; position += 1) {
      const token = canvas.tokens.get(position);
      paintToken(holder.children[position], token, last, tone, this.hidden);
    }
  }

  /** End with the text that was said, for readers of screens too. */
  end(state) {
    this.state = state;
    this.element.dataset.text = this.text;
    this.part("said").textContent = this.text;
    const empty = state === "done" && this.text.trim() === "";
    this.part("note").textContent = empty
      ? "The answer is empty: the model ended it at once."
      : "";
  }
}

/** Paint one position: a mask, a token, or nothing for a special token. */
function paintToken(span, token, last, tone, hidden) {
  if (token === undefined) {
    span.className = "mask";
    span.replaceChildren();
    delete span.dataset.detail;
    return;
  }
  if (span.textContent !== token.text || !span.hasChildNodes()) {
    span.replaceChildren(...partsOf(token.text));
  }
  const share = shareOf(token, last, tone);
  span.className = kindOf(token, share, hidden);
  span.style.setProperty("--share", String(share ?? 0));
  span.dataset.detail = detailOf(token);
  span.dataset.forward = String(token.forward);
}

function kindOf(token, share, hidden) {
  if (token.text === "" || hidden.has(token.text)) return "stop";
  if (token.forward === 0) return "given";
  return share === null ? "token filled unknown" : "token filled";
}

/** Return a token as a chip between the white space around it; a line break has no chip. */
function partsOf(text) {
  const [, before, core, after] = /^(\s*)(.*?)(\s*)$/s.exec(text);
  if (core === "" && text.includes("\n")) return [text];
  const chip = document.createElement("i");
  chip.textContent = core || text;
  return core === "" ? [chip] : [before, chip, after];
}

/** Return where a token is on the scale from 0 to 1; null if that is not known. */
function shareOf(token, last, tone) {
  if (tone === "confidence") return token.confidence;
  return last > 1 ? (token.forward - 1) / (last - 1) : 0;
}

/** Describe a token in a line. */
function detailOf(token) {
  if (token.forward === 0) return `“${token.text.trim()}” was given`;
  const certain =
    token.confidence === null ? "" : `, confidence ${token.confidence.toFixed(2)}`;
  return `“${token.text.trim()}” in forward ${token.forward}${certain}`;
}

/** Fill a list of numbers. */
function showNumbers(list, numbers) {
  list.replaceChildren();
  for (const [name, value] of Object.entries(numbers)) {
    if (value === undefined) continue;
    const [entry, term, number] = ["div", "dt", "dd"].map((tag) => document.createElement(tag));
    term.textContent = name;
    number.textContent = String(value);
    if (number.textContent.length > 12) entry.className = "wide";
    entry.append(term, number);
    list.append(entry);
  }
}
