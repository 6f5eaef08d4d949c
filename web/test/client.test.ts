/** The client against a fake socket: the frames it sends, and its state after those it receives. */

import { afterEach, beforeEach, expect, test, vi } from "vitest";
import type { Client, ConnectionState } from "../src/client/index.ts";
import { completed, connected, created, delta, FakeSocket, responseOf, tick } from "./fake-socket.ts";

let client: Client;
beforeEach(() => void vi.useFakeTimers());
afterEach(() => {
  client.close();
  vi.useRealTimers();
});

function refusal(status: number, code: string): Response {
  return Response.json({ error: { message: code, type: "x", param: null, code } }, { status });
}

test("it asks for its subprotocol below the server's own path", () => {
  client = connected();
  expect(FakeSocket.last.url.href).toBe("ws://host/root/v1/responses");
  expect(FakeSocket.last.protocols).toEqual(["streamer.v1.json"]);
});

test("with a key every socket has a ticket of its own, and the key is in no address", async () => {
  let number = 0;
  client = connected({ key: "k", fetch: () => Promise.resolve(Response.json({ ticket: `t${(number += 1)}`, expires_in_s: 30 })) });
  await tick(5);
  expect(FakeSocket.last.protocols).toEqual(["streamer.v1.json", "streamer.ticket.t1"]);
  FakeSocket.last.welcome();
  FakeSocket.last.cut();
  await tick(20);
  expect(FakeSocket.last.protocols[1]).toBe("streamer.ticket.t2");
  expect(FakeSocket.all.some((socket) => socket.url.href.includes("k="))).toBe(false);
});

test("what is asked before there is a connection is sent when there is one", async () => {
  client = connected();
  const stream = client.create({ input: "hi" });
  await tick();
  expect(FakeSocket.last.sent).toEqual([]);
  FakeSocket.last.welcome();
  expect(FakeSocket.last.of("response.create")).toEqual([{ type: "response.create", input: "hi", stream_id: stream.lane }]);
});

test("what a shutdown cut off was stopped, and has reached no limit", async () => {
  client = connected();
  FakeSocket.last.welcome();
  const stream = client.create({ input: "hi" });
  await tick();
  FakeSocket.last.say(created(stream.lane, "r1"));
  const response = { ...responseOf("r1", "incomplete"), incomplete_details: { reason: "server_shutdown" } };
  FakeSocket.last.say({ type: "response.incomplete", response, sequence_number: 5, stream_id: stream.lane });
  await stream.done;
  expect(stream.status).toBe("cancelled");
});

test("after a cut it resumes after the last number and takes nothing twice", async () => {
  client = connected();
  FakeSocket.last.welcome();
  const stream = client.create({ input: "hi" });
  await tick();
  FakeSocket.last.say(created(stream.lane, "r1"));
  FakeSocket.last.say(delta(stream.lane, 4, "one "));
  FakeSocket.last.say(delta(stream.lane, 6, "two three "));
  FakeSocket.last.cut();
  await tick(20);
  FakeSocket.last.welcome();
  expect(FakeSocket.last.sent).toEqual([{ type: "response.resume", response_id: "r1", starting_after: 6, stream_id: stream.lane }]);
  FakeSocket.last.say({ type: "response.resumed", response_id: "r1", from: 6, status: "live", stream_id: stream.lane });
  FakeSocket.last.say(delta(stream.lane, 6, "two three "));
  FakeSocket.last.say(delta(stream.lane, 7, "four"));
  FakeSocket.last.say(completed(stream.lane, "r1", 8));
  await stream.done;
  expect([stream.text, stream.tokens, stream.status]).toEqual(["one two three four", 4, "completed"]);
});

test("a create that was lost on the way is asked for again", async () => {
  client = connected();
  FakeSocket.last.welcome();
  const stream = client.create({ input: "hi" });
  await tick();
  FakeSocket.last.cut();
  await tick(20);
  FakeSocket.last.welcome();
  expect(FakeSocket.last.of("response.create")).toHaveLength(1);
  expect(stream.status).toBe("sending");
});

test("what the server forgot is gone, with the text that came", async () => {
  client = connected();
  const epochs: string[] = [];
  client.on("epoch", (epoch) => epochs.push(epoch));
  FakeSocket.last.welcome("e1");
  const stream = client.create({ input: "hi" });
  await tick();
  FakeSocket.last.say(created(stream.lane, "r1"));
  FakeSocket.last.say(delta(stream.lane, 4, "half"));
  FakeSocket.last.cut(1012);
  await tick(20);
  FakeSocket.last.welcome("e2");
  FakeSocket.last.say({ type: "response.resumed", response_id: "r1", from: 4, status: "gone", stream_id: stream.lane });
  await stream.done;
  expect([stream.text, stream.status, stream.error?.code, epochs]).toEqual(["half", "gone", "gone", ["e2"]]);
});

test("of a lane one create is on its way at a time, so a refusal hits the one it means", async () => {
  client = connected();
  FakeSocket.last.welcome();
  const [a, b, c] = ["a", "b", "c"].map((input) => client.create({ input }, { lane: "L" }));
  await tick();
  expect(FakeSocket.last.of("response.create")).toHaveLength(1);
  FakeSocket.last.say(created("L", "ra"));
  expect(FakeSocket.last.of("response.create")).toHaveLength(2);
  FakeSocket.last.say({ type: "error", status: 400, error: { message: "no", type: "x", param: "input", code: null }, stream_id: "L" });
  expect(b?.error?.param).toBe("input");
  expect(a?.isEnded).toBe(false);
  FakeSocket.last.say({ type: "response.waiting", response_id: "rc", stream_id: "L", position: 1 });
  expect([c?.id, c?.status]).toEqual(["rc", "waiting"]);
  FakeSocket.last.say(delta("L", 4, "for a"));
  FakeSocket.last.say(completed("L", "ra", 5));
  FakeSocket.last.say(created("L", "rc"));
  FakeSocket.last.say(delta("L", 4, "for c"));
  expect([a?.text, c?.text]).toEqual(["for a", "for c"]);
});

test("a fork that waited in its lane when the socket closed is asked for again", async () => {
  client = connected();
  FakeSocket.last.welcome();
  const fork = client.fork("r0", { at: 3 }, {}, { lane: "L" });
  const known = client.resume({ id: "r9" });
  await tick();
  FakeSocket.last.say({ type: "response.waiting", response_id: "r1", stream_id: "L", position: 1 });
  FakeSocket.last.cut();
  await tick(20);
  FakeSocket.last.welcome();
  for (const [id, lane] of [["r1", "L"], ["r9", known.lane]] as const) {
    FakeSocket.last.say({ type: "response.resumed", response_id: id, from: -1, status: "gone", stream_id: lane });
  }
  expect(FakeSocket.last.of("response.create")).toEqual([{ type: "response.create", previous_response_id: "r0", fork: { at: 3 }, stream_id: "L" }]);
  expect([fork.status, known.status]).toEqual(["sending", "gone"]);
});

test("a server that takes the ticket's request and says nothing is asked again", async () => {
  let number = 0;
  const dead: typeof fetch = (_, init) => new Promise((_, reject) => init?.signal?.addEventListener("abort", () => reject(new Error("aborted"))));
  const alive = () => Promise.resolve(Response.json({ ticket: "t", expires_in_s: 30 }));
  client = connected({ key: "k", openMs: 20, fetch: (url, init) => ((number += 1) === 1 ? dead(url, init) : alive()) });
  await expect.poll(() => FakeSocket.all.length, { interval: 1 }).toBeGreaterThan(0);
  FakeSocket.last.welcome();
  expect(client.state.name).toBe("connected");
});

test("only the head of a lane is resumed; what waited behind it is asked for again", async () => {
  client = connected();
  FakeSocket.last.welcome();
  const a = client.create({ input: "a" }, { lane: "L" });
  const b = client.create({ input: "b" }, { lane: "L" });
  await tick();
  FakeSocket.last.say(created("L", "ra"));
  FakeSocket.last.say({ type: "response.waiting", response_id: "rb", stream_id: "L", position: 1 });
  FakeSocket.last.cut();
  await tick(20);
  FakeSocket.last.welcome();
  expect(FakeSocket.last.sent.map((event) => event.type)).toEqual(["response.resume"]);
  FakeSocket.last.say({ type: "response.resumed", response_id: "ra", from: 0, status: "live", stream_id: "L" });
  FakeSocket.last.say(completed("L", "ra", 5));
  expect(a.status).toBe("completed");
  expect(FakeSocket.last.sent.at(-1)).toMatchObject({ type: "response.resume", response_id: "rb" });
  FakeSocket.last.say({ type: "response.resumed", response_id: "rb", from: -1, status: "gone", stream_id: "L" });
  expect(FakeSocket.last.sent.at(-1)).toMatchObject({ type: "response.create", input: "b" });
  expect(b.isEnded).toBe(false);
});

test("a cancel before the id goes out with the id; one before the create is an end", async () => {
  client = connected();
  const early = client.create({ input: "never" });
  early.cancel();
  expect(early.status).toBe("cancelled");
  FakeSocket.last.welcome();
  const stream = client.create({ input: "hi" });
  await tick();
  stream.cancel();
  stream.cancel();
  expect(FakeSocket.last.of("response.cancel")).toEqual([]);
  FakeSocket.last.say(created(stream.lane, "r1"));
  expect(FakeSocket.last.of("response.cancel")).toEqual([{ type: "response.cancel", response_id: "r1" }]);
  expect(FakeSocket.last.of("response.create")).toHaveLength(1);
});

test("acks go out each eighth of the window, or by hand", async () => {
  client = connected();
  FakeSocket.last.welcome("e1", 16);
  const stream = client.create({ input: "hi" });
  await tick();
  FakeSocket.last.say(created(stream.lane, "r1"));
  for (let number = 4; number < 9; number += 1) FakeSocket.last.say(delta(stream.lane, number, "x"));
  const acked = FakeSocket.last.of("response.ack").map((event) => "sequence_number" in event && event.sequence_number);
  expect(acked).toEqual([4, 6, 8]);
  client.close();
  client = connected({ acks: "manual" });
  FakeSocket.last.welcome("e1", 16);
  const other = client.create({ input: "hi" });
  await tick();
  FakeSocket.last.say(created(other.lane, "r1"));
  FakeSocket.last.say(delta(other.lane, 40, "x"));
  expect(FakeSocket.last.of("response.ack")).toEqual([]);
  other.ack();
  expect(FakeSocket.last.of("response.ack")).toHaveLength(1);
});

test("a slow reader is attached again once it has used what it has", async () => {
  client = connected({ acks: "manual" });
  FakeSocket.last.welcome();
  const stream = client.create({ input: "hi" });
  await tick();
  FakeSocket.last.say(created(stream.lane, "r1"));
  FakeSocket.last.say(delta(stream.lane, 9, "x"));
  FakeSocket.last.say({ type: "error", status: 408, error: { message: "slow", type: "x", param: null, code: "reader_too_slow" }, stream_id: stream.lane });
  expect([stream.status, FakeSocket.last.of("response.resume").length]).toEqual(["paused", 0]);
  stream.ack();
  expect(FakeSocket.last.of("response.resume")).toMatchObject([{ response_id: "r1", starting_after: 9 }]);
});

test("a steered response is followed by its successor in the lane", async () => {
  client = connected();
  FakeSocket.last.welcome();
  const stream = client.create({ input: "hi" });
  await tick();
  FakeSocket.last.say(created(stream.lane, "r1"));
  const promise = stream.steer("rather this");
  FakeSocket.last.say(completed(stream.lane, "r1", 5));
  FakeSocket.last.say(created(stream.lane, "r2", "r1"));
  FakeSocket.last.say(delta(stream.lane, 4, "this"));
  const next = await promise;
  expect([next.id, next.text, stream.text]).toEqual(["r2", "this", ""]);
  const refused = next.steer("no");
  FakeSocket.last.say({ type: "response.steer.failed", sequence_number: 4, steer: { previous_response_id: "r2" }, error: { code: "c", message: "m", type: "t" } });
  await expect(refused).rejects.toMatchObject({ code: "c" });
});

test.each([1001, 1006, 1011, 1012, 1013, 1015])("it comes back after %i", async (code) => {
  client = connected();
  FakeSocket.last.welcome();
  FakeSocket.last.cut(code);
  expect(client.state.name).toBe("reconnecting");
  await tick(20);
  expect(FakeSocket.all).toHaveLength(2);
});

test.each([1000, 1009, 4400, 4401, 4403, 4429])("it stays offline after %i, until connect is called", async (code) => {
  client = connected();
  FakeSocket.last.welcome();
  FakeSocket.last.cut(code, "because");
  await tick(20);
  expect(client.state).toEqual({ name: "offline", code, reason: "because" });
  expect(FakeSocket.all).toHaveLength(1);
  client.connect();
  expect(FakeSocket.all).toHaveLength(2);
});

test("silence is answered with a ping, more of it with another socket", async () => {
  client = connected({ pingMs: 10, pongMs: 10 });
  FakeSocket.last.welcome();
  const first = FakeSocket.last;
  await tick(60);
  expect(first.of("session.ping").length).toBeGreaterThan(0);
  expect([first.isClosed, FakeSocket.all.length > 1]).toEqual([true, true]);
});

test("a missing or invalid key locks it, and another one opens it", async () => {
  let isKnown = false;
  const states: ConnectionState[] = [];
  const fetch = () => Promise.resolve(isKnown ? Response.json({ ticket: "t", expires_in_s: 30 }) : refusal(401, "invalid_api_key"));
  client = connected({ fetch });
  client.on("state", (state) => states.push(state));
  FakeSocket.last.cut();
  await tick(5);
  expect(client.state).toEqual({ name: "locked", reason: "missing" });
  client.setKey("wrong");
  await tick(5);
  expect(client.state).toEqual({ name: "locked", reason: "invalid" });
  client.setKey("ключ");
  await tick(5);
  expect(client.state).toEqual({ name: "locked", reason: "invalid" });
  isKnown = true;
  client.setKey("right");
  await tick(5);
  FakeSocket.last.welcome();
  expect(client.state.name).toBe("connected");
});

test("where HTTP works and two handshakes did not, it goes on without sockets", async () => {
  const sampling_defaults = { temperature: 0.7 };
  const models = { object: "list", data: [{ id: "m", object: "model", created: 0, max_model_len: 9, sampling_defaults, owned_by: "x" }] };
  client = connected({ fetch: () => Promise.resolve(Response.json(models)) });
  FakeSocket.last.cut();
  await tick(20);
  expect(client.state.name).not.toBe("connected");
  FakeSocket.last.cut();
  await tick(20);
  expect(client.state).toEqual({ name: "connected", transport: "sse" });
  expect(client.session).toEqual({ model: "m", context_length: 9, sampling_defaults });
});

test("over SSE it tries a socket again now and then, and goes on without one until it is there", async () => {
  let now = 0;
  const models = { object: "list", data: [{ id: "m", object: "model", created: 0, max_model_len: 9, owned_by: "x" }] };
  client = connected({ fetch: () => Promise.resolve(Response.json(models)), now: () => now });
  for (let i = 0; i < 2; i += 1) {
    FakeSocket.last.cut();
    await tick(20);
  }
  const sse = { name: "connected", transport: "sse" };
  expect(client.state).toEqual(sse);
  client.check(); // too soon
  expect(FakeSocket.all.length).toBe(2);
  for (const number of [3, 4]) {
    now += 31_000;
    client.check();
    expect([FakeSocket.all.length, client.state]).toEqual([number, sse]);
    if (number === 3) FakeSocket.last.cut();
    else FakeSocket.last.welcome();
  }
  expect(client.state).toEqual({ name: "connected", transport: "websocket" });
  client.create({ input: "hi" }, { lane: "a" });
  await tick();
  expect(FakeSocket.last.of("response.create")).toHaveLength(1);
});
