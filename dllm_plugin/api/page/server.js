"use strict";
// Requests to a server {base, model, key, own}, and what to do about errors.

// In this order; what is not known is not shown.
const NUMBERS = {
  tokens: undefined,
  forwards: undefined,
  "tokens per forward": undefined,
  time: undefined,
  "first text": undefined,
  "tokens/s": undefined,
};

/** An error with a sentence for people, and the field to change. */
class Refusal extends Error {
  constructor(sentence, field) {
    super(sentence);
    this.field = field;
  }
}

/** Return a server's address as people write it. */
function addressOf(server) {
  return server.base.replace(/\/$/, "");
}

/** Return the sentence and the field for a reply that is an error. */
function adviceOn(status, sentence, server) {
  const side = server.own ? "" : "other-";
  if (status === 401 || status === 403) {
    const where = server.own ? "This server" : addressOf(server);
    const said = server.key
      ? `${where} does not accept this key.`
      : `${where} asks for a key.`;
    return [`${said} Enter the key that it was started with (--api-key).`, `${side}key`];
  }
  if (status === 404 && server.model) {
    const empty = server.own ? "this server's own" : "its first one";
    return [`${sentence} Leave the model empty for ${empty}.`, `${side}model`];
  }
  if (status === 404 && !server.own) {
    return [`${addressOf(server)} is no OpenAI API. Most addresses end in /v1.`, "other-url"];
  }
  return [sentence, null];
}

/** Return the sentence of an error that the server sent. */
function sentenceIn(status, text) {
  try {
    const error = JSON.parse(text).error;
    return error.message ?? String(error);
  } catch {
    return `The server answered with status ${status}. ${text.slice(0, 300)}`;
  }
}

/** Fetch below the server's address; errors become refusals. */
async function ask(server, path, options) {
  const headers = { "Content-Type": "application/json" };
  if (server.key) headers.Authorization = `Bearer ${server.key}`;
  let url;
  try {
    url = new URL(path, server.base);
  } catch {
    const given = `${addressOf(server)} is no address.`;
    throw new Refusal(`${given} Write one such as http://localhost:8001/v1`, "other-url");
  }
  let reply;
  try {
    reply = await fetch(url, { headers, ...options });
  } catch (problem) {
    if (problem.name === "AbortError") throw problem;
    const todo = server.own
      ? "Check that it still runs, then try again."
      : "Check the address, that it runs, and that it allows requests from other pages.";
    throw new Refusal(`No answer from ${addressOf(server)}. ${todo}`, server.own ? null : "other-url");
  }
  if (reply.ok) return reply;
  const sentence = sentenceIn(reply.status, await reply.text());
  throw new Refusal(...adviceOn(reply.status, sentence, server));
}

/** Post a body with the server's model, and return the reply. */
async function post(server, path, body, signal) {
  let model = server.model || server.default;
  if (!model) {
    const listed = await ask(server, "models", { signal });
    model = (await listed.json()).data[0].id;
  }
  const text = JSON.stringify({ model, temperature: 0, ...body });
  return ask(server, path, { method: "POST", body: text, signal });
}

/** Yield the chunks of a stream. */
async function* chunksOf(reply, server) {
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  for (;;) {
    let piece;
    try {
      piece = await reader.read();
    } catch (problem) {
      if (problem.name === "AbortError") throw problem;
      throw new Refusal(`The connection to ${addressOf(server)} broke off. Run it again.`, null);
    }
    if (piece.done) return;
    const { bodies, rest } = parseEvents(buffer + piece.value);
    buffer = rest;
    for (const chunk of bodies) {
      if (chunk.error) throw new Refusal(chunk.error.message ?? String(chunk.error), null);
      yield chunk;
    }
  }
}

/** Stream an answer; `on` takes frames, pieces of text and numbers as they come. */
async function streamAnswer(server, body, on, signal) {
  const began = performance.now();
  const numbers = { ...NUMBERS };
  const asked = { ...body, stream: true, stream_options: { include_usage: true } };
  const reply = await post(server, "chat/completions", asked, signal);
  for await (const chunk of chunksOf(reply, server)) {
    const seconds = (performance.now() - began) / 1000;
    for (const choice of chunk.choices ?? []) {
      const piece = choice.delta?.content ?? "";
      if (piece) {
        numbers["first text"] ??= `${seconds.toFixed(2)} s`;
        on.text(piece);
      }
      if (choice.diffusion?.set) {
        numbers.forwards = choice.diffusion.forward;
        on.frame(choice.diffusion);
      }
    }
    Object.assign(numbers, countsIn(chunk.metrics?.diffusion));
    numbers.time = `${seconds.toFixed(2)} s`;
    if (chunk.usage) {
      numbers.tokens ??= chunk.usage.completion_tokens;
      numbers["tokens/s"] = (chunk.usage.completion_tokens / seconds).toFixed(1);
    }
    on.numbers(numbers);
  }
}

/** Fill the gaps of a text in one request, and hand over its frames. */
async function fillGaps(server, body, stops, on, signal) {
  const began = performance.now();
  const asked = { ...body, diffusion: { trace: true } };
  const reply = await post(server, "infill", asked, signal);
  const [choice] = (await reply.json()).choices;
  const answers = body.messages !== undefined;
  for (const frame of framesOfInfill(body.text, answers, choice, stops)) on.frame(frame);
  on.text(choice.text);
  const numbers = { ...NUMBERS, ...countsIn(choice.diffusion) };
  numbers.time = `${((performance.now() - began) / 1000).toFixed(2)} s`;
  const { lengths } = choice.diffusion;
  if (lengths) {
    const scores = lengths.map((one) => `${one.length} \u2192 ${one.score.toFixed(3)}`);
    numbers["scores of lengths"] = scores.join(" \u00b7 ");
  }
  on.numbers(numbers);
}

/** Return what a request took, by the names that are shown. */
function countsIn(took) {
  if (!took) return {};
  const { forwards, tokens } = took;
  return { forwards, tokens, "tokens per forward": (tokens / forwards).toFixed(1) };
}
