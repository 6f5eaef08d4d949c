// OpenAI's package for JS, unchanged, against the server at argv[2] with the model argv[3].
// Prints what it heard as one JSON object; tests/clients/test_openai_js.py judges it.

import OpenAI from "openai";
import { ResponsesWS } from "openai/resources/responses/ws";

const [baseURL, model, relayURL] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0 });
const FINAL = new Set(["response.completed", "response.incomplete", "response.failed"]);
setTimeout(() => { console.error("it takes too long"); process.exit(1); }, 60_000).unref();
const settings = { model, temperature: 0 };

async function chat() {
  const body = { ...settings, messages: [{ role: "user", content: "count to 12" }], max_tokens: 20 };
  const whole = await client.chat.completions.create(body);
  const stream = await client.chat.completions.create({
    ...body, stream: true, stream_options: { include_usage: true },
  });
  let text = "", chunks = 0, usage = null;
  for await (const chunk of stream) {
    chunks += 1;
    usage = chunk.usage ?? usage;
    for (const choice of chunk.choices) text += choice.delta.content ?? "";
  }
  return { whole: whole.choices[0].message.content, whole_usage: whole.usage, text, chunks, usage };
}

async function response() {
  const stream = await client.responses.create({
    ...settings, input: "count to 12", max_output_tokens: 20, stream: true,
  });
  const heard = { text: "", numbers: [], final: null };
  for await (const event of stream) take(heard, event);
  const stored = await client.responses.retrieve(heard.final.id);
  return { ...heard, stored: stored.output_text };
}

function take(heard, event) {
  if (event.type === "error") throw new Error(JSON.stringify(event));
  heard.numbers.push(event.sequence_number);
  if (event.type === "response.created") heard.id = event.response.id;
  if (event.type === "response.output_text.delta") heard.text += event.delta;
  if (FINAL.has(event.type)) heard.final = event.response;
}

// Two lanes from one parent, then a next turn on each.
async function lanes() {
  const parent = await client.responses.create({ ...settings, input: "count to 3", max_output_tokens: 20 });
  const heard = { a: [], b: [] };
  const socket = new ResponsesWS(client);
  const ask = (lane, input, previous_response_id) => socket.send({
    type: "response.create", ...settings, input, previous_response_id,
    stream_id: lane, max_output_tokens: 20,
  });
  ask("a", "count to 5", parent.id);
  ask("b", "count to 6", parent.id);
  for await (const event of socket) {
    if (event.type === "error") throw event.error;
    if (event.type !== "message") continue;
    const turns = heard[event.message.stream_id];
    if (event.message.type === "response.created") turns.push({ text: "", numbers: [], final: null });
    const turn = turns.at(-1);
    take(turn, event.message);
    if (!turn.final) continue;
    if (turns.length === 1) ask(event.message.stream_id, "count to 2", turn.final.id);
    if (Object.values(heard).every((turns) => turns.length === 2 && turns[1].final)) break;
  }
  socket.close();
  return { parent: parent.id, ...heard };
}

// The first answer is steered when it has begun; its successor answers the steer.
async function steered() {
  const socket = new ResponsesWS(client);
  const turns = [];
  let accepted = null;
  socket.send({ type: "response.create", ...settings, input: "count", max_output_tokens: 20_000 });
  for await (const event of socket) {
    if (event.type === "error") throw event.error;
    if (event.type !== "message") continue;
    const message = event.message;
    if (message.type === "response.steer.accepted") { accepted = message.steer; continue; }
    if (message.type === "response.created") turns.push({ text: "", numbers: [], final: null });
    const turn = turns.at(-1);
    const isFirst = turns.length === 1 && turn.text === "";
    take(turn, message);
    if (isFirst && turn.text !== "") {
      socket.send({ type: "response.steer", previous_response_id: turn.id, input: "count to 4" });
    }
    if (turns.length === 2 && turn.final) break;
  }
  socket.close();
  return { accepted, turns };
}

// The line is cut by whoever reads "cut" on our output; the client reconnects by itself, and what
// was cut is read on over HTTP.
async function reconnected() {
  const far = new OpenAI({ baseURL: relayURL, apiKey: "none", maxRetries: 8 });
  const attempts = [];
  const socket = new ResponsesWS(far, {
    reconnect: { initialDelay: 20, maxDelay: 200, maxRetries: 100, onReconnecting: (event) => { attempts.push(event.closeCode); } },
  });
  const heard = { text: "", numbers: [], final: null };
  socket.send({ type: "response.create", ...settings, input: "count", max_output_tokens: 400 });
  let next = null;
  for await (const event of socket) {
    if (event.type === "message" && next === null) {
      const before = heard.text.length;
      if (attempts.length === 0) take(heard, event.message);
      if (before <= 40 && heard.text.length > 40) process.stdout.write("cut\n");
    } else if (event.type === "reconnected") {
      const rest = await far.responses.retrieve(heard.id, {
        stream: true, starting_after: heard.numbers.at(-1),
      });
      for await (const missed of rest) take(heard, missed);
      next = { text: "", numbers: [], final: null };
      socket.send({
        type: "response.create", ...settings, input: "count to 3", previous_response_id: heard.id,
      });
    } else if (event.type === "message") {
      take(next, event.message);
      if (next.final) break;
    }
  }
  socket.close();
  return { attempts, ...heard, next };
}

async function refusal() {
  try {
    await client.responses.create({ model: "other", input: "x" });
  } catch (error) {
    return { kind: error.constructor.name, status: error.status, code: error.code, param: error.param };
  }
}

const heard = { chat: await chat(), response: await response(), lanes: await lanes() };
heard.refusal = await refusal();
if (relayURL) Object.assign(heard, { steered: await steered(), reconnected: await reconnected() });
console.log(JSON.stringify(heard));
