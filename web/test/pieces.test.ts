/** Reasoning and calls of tools: from events, over a cut, into the next turn. */

import { afterEach, beforeAll, beforeEach, describe, expect, test, vi } from "vitest";
import type { Client } from "../src/client/index.ts";
import type { ServerEvent } from "../src/client/wire/responses.ts";
import { Answer } from "../src/chat/conversation/answer.ts";
import { Conversation, inputFor } from "../src/chat/conversation/conversation.ts";
import { toolsOf } from "../src/chat/conversation/sampling.ts";
import { TokenReader } from "../src/chat/conversation/tokens.ts";
import { asKeptConversation, asKeptMessage, fromFile, toConversation, toFile } from "../src/chat/history/records.ts";
import { pretty } from "../src/chat/message/pretty.ts";
import { completed, connected, created, delta, FakeSocket, tick } from "./fake-socket.ts";

beforeAll(() => {
  vi.stubGlobal("cancelAnimationFrame", () => undefined);
  vi.stubGlobal("requestAnimationFrame", () => 1);
});

let client: Client;
beforeEach(() => void vi.useFakeTimers());
afterEach(() => {
  client?.close();
  vi.useRealTimers();
});

const LANE = "lane-1";
const thinking = (text: string) => ({ type: "reasoning", id: "rs", status: "completed", content: text ? [{ type: "reasoning_text", text }] : [], summary: [] });
const call = (text: string) => ({ type: "function_call", id: "fc", call_id: "c1", name: "weather", arguments: text, status: "completed" });

/** The events of an answer that thinks, speaks and calls; each number as the server gives it. */
function events(): ServerEvent[] {
  const made: object[] = [
    created(LANE, "r1"),
    { type: "response.in_progress", response: { id: "r1" } },
    { type: "response.output_item.added", item: thinking(""), output_index: 0 },
    { type: "response.content_part.added", part: {}, output_index: 0 },
    { type: "response.reasoning_text.delta", delta: "Let me ", output_index: 0 },
    { type: "response.reasoning_text.delta", delta: "see.", output_index: 0 },
    { type: "response.reasoning_text.done", text: "Let me see.", output_index: 0 },
    { type: "response.content_part.done", part: {}, output_index: 0 },
    { type: "response.output_item.done", item: thinking("Let me see."), output_index: 0 },
    { type: "response.output_item.added", item: { type: "message", content: [] }, output_index: 1 },
    { type: "response.content_part.added", part: {}, output_index: 1 },
    { ...delta(LANE, 0, "I look. "), output_index: 1 },
    { type: "response.output_text.done", text: "I look. ", output_index: 1 },
    { type: "response.content_part.done", part: {}, output_index: 1 },
    { type: "response.output_item.done", item: { type: "message", content: [{ type: "output_text", text: "I look. " }] }, output_index: 1 },
    { type: "response.output_item.added", item: call(""), output_index: 2 },
    { type: "response.function_call_arguments.delta", delta: '{"city":', output_index: 2 },
    { type: "response.function_call_arguments.delta", delta: '"Oslo"}', output_index: 2 },
    { type: "response.function_call_arguments.done", arguments: '{"city":"Oslo"}', output_index: 2 },
    { type: "response.output_item.done", item: call('{"city":"Oslo"}'), output_index: 2 },
    completed(LANE, "r1", 0),
  ];
  return made.map((event, i) => ({ ...event, sequence_number: i, stream_id: LANE }) as unknown as ServerEvent);
}

const LOOKED = [
  { kind: "reasoning", text: "Let me see.", isDone: true },
  { kind: "text", text: "I look. ", isDone: true },
  { kind: "call", text: '{"city":"Oslo"}', isDone: true, name: "weather", callId: "c1" },
];
const untimed = (answer: Answer) => answer.pieces.value.map(({ ms: _, ...piece }) => piece);

/** An answer that has had the first `count` events. */
async function after(count: number) {
  client = connected();
  FakeSocket.last.welcome();
  const stream = client.create({ input: "hi" }, { lane: LANE });
  const answer = new Answer({ ask: {}, fork: null });
  answer.follow(stream, { created: () => undefined, grown: () => undefined, ended: (it) => it.settle() });
  await tick();
  for (const event of events().slice(0, count)) FakeSocket.last.say(event);
  return { stream, answer };
}

describe("the pieces of an answer", () => {
  test("come in order, and its text is what it says alone", async () => {
    const { stream, answer } = await after(21);
    expect(stream.status).toBe("completed");
    expect(untimed(answer)).toEqual(LOOKED);
    expect([stream.text, answer.text.value, answer.kinds.value]).toEqual(["I look. ", "I look. ", "reasoning text call"]);
    expect(answer.pieces.value.every(({ ms }) => ms !== undefined)).toBe(true);
  });

  test("have the server's time of the reasoning in the end, however late its events came", async () => {
    const { answer } = await after(20);
    const usage = { output_tokens: 900, output_tokens_details: { reasoning_tokens: 600 } };
    const end = { ...completed(LANE, "r1", 21), timing: { per_token_s: 0.005 } } as unknown as { response: object };
    FakeSocket.last.say({ ...end, response: { ...end.response, usage } } as unknown as ServerEvent);
    expect(answer.pieces.value.map(({ ms }) => ms! > 2000)).toEqual([true, false, false]);
    expect(answer.pieces.value[0]!.ms).toBeCloseTo(3000);
  });

  test("count tokens by the deltas, not by the events around them", async () => {
    for (const [count, tokens] of [[5, 1], [6, 2], [12, 3], [18, 5]] as const) {
      const { stream } = await after(count);
      expect(stream.tokens).toBe(tokens);
      client.close();
    }
  });

  for (const at of [5, 9, 12, 17, 20]) {
    test(`are the same after a reload that follows event ${at}`, async () => {
      const { answer } = await after(at);
      client.close();
      const stored = answer.stream!;
      const kept = { id: "r1", after: stored.sequence, text: stored.text, pieces: JSON.parse(JSON.stringify(stored.pieces)) };
      client = connected();
      FakeSocket.last.welcome();
      const resumed = client.resume(kept, { lane: LANE });
      await tick();
      FakeSocket.last.say({ type: "response.resumed", response_id: "r1", from: at - 1, status: "live", stream_id: LANE });
      for (const event of events().slice(at)) FakeSocket.last.say(event);
      const again = new Answer({ ask: {}, fork: null });
      again.follow(resumed, { created: () => undefined, grown: () => undefined, ended: () => undefined });
      again.settle();
      expect(untimed(again)).toEqual(LOOKED);
      expect([resumed.text, resumed.tokens]).toEqual(["I look. ", 5]);
    });
  }

  test("go with the next turn, and with what the tools returned", async () => {
    const { answer } = await after(21);
    const conversation = new Conversation();
    const asked = conversation.add({ role: "user", parent: null, text: "Rain?", answer: null });
    const answered = conversation.add({ role: "assistant", parent: asked, text: "", answer });
    const results = [{ callId: "c1", name: "weather", output: "wet" }];
    const returned = conversation.add({ role: "user", parent: answered, text: "", answer: null, results });
    const sent = [
      { role: "user", content: "Rain?" },
      { type: "reasoning", content: [{ type: "reasoning_text", text: "Let me see." }] },
      { role: "assistant", content: "I look. " },
      { type: "function_call", call_id: "c1", name: "weather", arguments: '{"city":"Oslo"}' },
      { type: "function_call_output", call_id: "c1", output: "wet" },
    ];
    expect(inputFor(returned)).toEqual(sent);
    const messages = conversation.messages.value.map((message) => asKeptMessage(conversation, message));
    const again = toConversation(asKeptConversation(conversation), JSON.parse(JSON.stringify(messages)));
    expect(inputFor(again.leaf.value!)).toEqual(sent);
    const [imported] = fromFile(JSON.stringify(toFile([conversation])));
    expect(inputFor(imported!.leaf.value!)).toEqual(sent);
    const broken = JSON.stringify(toFile([conversation])).replace('"kind":"reasoning"', '"kind":5');
    expect(() => fromFile(broken)).toThrow("no Streamer chats");
  });
});

test("tokens after reasoning are counted from the answer's end", () => {
  const logprob = (token: string) => ({ token, bytes: [...new TextEncoder().encode(token)], logprob: -1, top_logprobs: [] });
  const reader = new TokenReader();
  reader.add({ type: "response.output_text.delta", sequence_number: 0, item_id: "", delta: "Hi you", output_index: 1, content_index: 0, logprobs: ["</think>", "Hi", " you"].map(logprob) }, "r1");
  // 10 tokens, the last of which is the end: </think> is the seventh
  expect(reader.finished(10, true).map(({ at }) => at)).toEqual([6, 7, 8]);
});

describe("arguments", () => {
  const whole = '{"a":[1,{"b":"x, {\\"y\\": [}"}],"c":{},"d":[]}';

  test("are laid out as JSON.stringify does", () => {
    expect(pretty(whole)).toBe(JSON.stringify(JSON.parse(whole), null, 2));
  });

  test("never move while they are written", () => {
    const end = pretty(whole);
    for (let i = 0; i <= whole.length; i += 1) {
      const part = pretty(whole.slice(0, i));
      expect(end.startsWith(part.trimEnd())).toBe(true);
    }
  });
});

test("tools are a JSON list of functions with names", () => {
  expect(toolsOf(" ")).toEqual([]);
  expect(toolsOf('[{"name": "f", "parameters": {}}]')).toEqual([{ type: "function", name: "f", parameters: {} }]);
  for (const wrong of ["{", "{}", "[1]", '[{"parameters": {}}]']) expect(toolsOf(wrong)).toBeNull();
});
