"use strict";
// Streams, canvases and gaps, without access to the page: tested by themselves.

const GAP = /\[MASK:(?:\d+(?:,\d+)*|auto)\]/;
const EMPTY = { tokens: new Map(), forward: 0, length: 0, final: 0 };

/** Split what has arrived of a stream into the bodies of whole events, and the rest. */
function parseEvents(buffer) {
  const parts = buffer.split(/\r?\n\r?\n/);
  const rest = parts.pop();
  const bodies = [];
  for (const part of parts) {
    const data = part.split(/\r?\n/).filter((line) => line.startsWith("data:"));
    const body = data.map((line) => line.slice(5).trimStart()).join("\n");
    if (body && body !== "[DONE]") bodies.push(JSON.parse(body));
  }
  return { bodies, rest };
}

/** Return the canvas with the changes of a frame; the old one stays as it is. */
function applyFrame(canvas, frame) {
  const tokens = new Map(canvas.tokens);
  for (const position of frame.unset) tokens.delete(position);
  for (const [position, text, confidence] of frame.set) {
    const known = tokens.get(position);
    const forward = known === undefined ? frame.forward : known.forward;
    tokens.set(position, { text, confidence, forward });
  }
  return {
    tokens,
    forward: Math.max(frame.forward, canvas.forward),
    length: frame.start + frame.length,
    final: frame.final,
  };
}

/** Return the tokens of an infill, empty from a gap's stop token on: its text ends there. */
function withoutStops(tokens, steps, stops) {
  let ended = false;
  return tokens.map((token, place) => {
    const given = steps[place] === 0;
    ended = !given && (ended || stops.includes(token));
    return ended ? "" : token;
  });
}

/** Return the frames of an infill: what is given first, then each forward's tokens. */
function framesOfInfill(text, answers, choice, stops) {
  const { steps, confidences } = choice.diffusion.trace;
  const tokens = withoutStops(choice.diffusion.trace.tokens, steps, stops);
  const lead = answers ? "" : text.slice(0, text.search(GAP));
  const tail = text.split(GAP).pop();
  const length = tokens.length + 2;
  const frames = [];
  for (let step = 0; step <= Math.max(...steps); step += 1) {
    const set = step ? [] : [[0, lead, null], [length - 1, tail, null]];
    tokens.forEach((token, place) => {
      if (steps[place] === step) set.push([place + 1, token, confidences[place]]);
    });
    if (set.length) frames.push({ forward: step, start: 0, length, final: 0, set, unset: [] });
  }
  frames.at(-1).final = length;
  return frames;
}

/** Return the milliseconds that a canvas is shown for: some five seconds for all of them. */
function delayOf(numFrames, speed) {
  if (speed === 0) return 0;
  return Math.min(Math.max(5000 / numFrames, 80), 1000) / speed;
}

/** Return why the server cannot fill gaps and what to do, or nothing. */
function refusalOfGaps(facts) {
  if (facts.fills) return "";
  const { strategy, filling } = facts;
  if (filling.length === 0) {
    return (
      "This model never sees what comes after a gap, so it cannot fill one. " +
      "Serve LLaDA, Dream or DiffuCoder to fill gaps."
    );
  }
  return (
    `Under strategy ${strategy} the model never sees what comes after a gap. ` +
    `Start the server with: diffuplug serve --strategy ${filling[0]}`
  );
}
