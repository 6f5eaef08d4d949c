/**
 * The client against a real server over the fake model, whose text is numbers in order: a missing
 * or repeated one shows. The server's address is in PAGE_TEST_URL
 * (tests/clients/test_page_client.py).
 */

import { afterEach, describe, expect, test } from "vitest";
import WebSocket from "ws";
import { Client, ClientError, type ClientOptions, type EngineBody, type ResponseStream, type SocketClass } from "../../src/client/index.ts";
import { msgpack } from "../../src/client/transport/msgpack.ts";
import { Relay } from "./relay.ts";

const SERVER = new URL(process.env["PAGE_TEST_URL"] ?? "");
const KEYED = new URL(process.env["PAGE_TEST_KEYED_URL"] ?? "");
const KEY = process.env["PAGE_TEST_KEY"] ?? "";

const toClose: { close(): void }[] = [];
afterEach(() => toClose.splice(0).forEach((it) => it.close()));

function clientOf(baseUrl: URL, options: Partial<ClientOptions> = {}): Client {
  const client = new Client({ baseUrl, WebSocket: WebSocket as unknown as SocketClass, random: () => -0.7, ...options });
  toClose.push(client);
  client.connect();
  return client;
}

async function relay(refusesUpgrades = false): Promise<Relay> {
  const opened = await Relay.open(SERVER, refusesUpgrades);
  toClose.push(opened);
  return opened;
}

function numbers(text: string): number[] {
  return text.trim().split(/\s+/).map(Number);
}

function expectCounting(stream: ResponseStream, first = 1): void {
  const seen = numbers(stream.text);
  expect(seen.length).toBeGreaterThan(0);
  expect(seen).toEqual(seen.map((_, i) => first + i));
  const item = stream.response?.output[0];
  expect(item?.type === "message" ? item.content[0]?.text : undefined).toBe(stream.text);
}

/** Resolves once the stream has that many tokens. */
function reached(stream: ResponseStream, tokens: number): Promise<void> {
  return new Promise((resolve) => {
    const off = stream.on("delta", () => {
      if (stream.tokens >= tokens) off(), resolve();
    });
  });
}

function connected(client: Client): Promise<void> {
  return new Promise((resolve) => {
    const off = client.on("state", (state) => {
      if (state.name === "connected") off(), resolve();
    });
  });
}

describe.each(["json", "msgpack"] as const)("a socket with %s", (name) => {
  const options = name === "json" ? {} : { codec: msgpack };

  test("an answer, its figures and its events", async () => {
    const client = clientOf(SERVER, options);
    const stream = client.create({ input: "count to 30", top_logprobs: 2, return_token_ids: true, include: ["message.output_text.logprobs"] });
    let ids = 0;
    stream.on("delta", (event) => (ids += event.token_ids?.length ?? 0));
    await stream.done;
    expectCounting(stream);
    expect([stream.status, numbers(stream.text).length]).toEqual(["completed", 30]);
    expect(stream.tokens).toBe(stream.response?.usage?.output_tokens);
    expect(ids).toBe(stream.tokens);
    expect(stream.timing?.total_s).toBeGreaterThan(0);
    expect(client.session?.epoch).toBeTruthy();
  });

  test("cut again and again, nothing is lost and nothing doubled", async () => {
    const between = await relay();
    const client = clientOf(between.url, options);
    const streams = ["a", "b", "c"].map(() => client.create({ input: "count", max_output_tokens: 300 }));
    for (const tokens of [20, 90, 170]) {
      await reached(streams[0] as ResponseStream, tokens);
      between.cut();
    }
    await Promise.all(streams.map((stream) => stream.done));
    for (const stream of streams) {
      expectCounting(stream);
      expect([stream.tokens, stream.status]).toEqual([300, "incomplete"]);
    }
  });
});

test("a cancel ends it with what it has", async () => {
  const stream = clientOf(SERVER).create({ input: "count", max_output_tokens: 50_000 });
  await reached(stream, 10);
  stream.cancel();
  await stream.done;
  expectCounting(stream);
  expect(stream.status).toBe("cancelled");
});

test("many lanes at once, and two in a row in each", async () => {
  const client = clientOf(SERVER);
  const made = Array.from({ length: 40 }, (_, i) => client.create({ input: "count", max_output_tokens: 10 + i }, { lane: `lane ${i % 20}` }));
  await Promise.all(made.map((stream) => stream.done));
  made.forEach((stream, i) => {
    expectCounting(stream);
    expect(stream.tokens).toBe(10 + i);
  });
});

test("a refusal is the stream's error, and the socket goes on", async () => {
  const client = clientOf(SERVER);
  const refused = client.create({ input: "hi", temperature: -1 }, { lane: "L" });
  const good = client.create({ input: "count to 3" }, { lane: "L" });
  await Promise.all([refused.done, good.done]);
  expect([refused.status, refused.error?.status, refused.error?.param]).toEqual(["failed", 400, "temperature"]);
  expect(good.status).toBe("completed");
});

test("a fork begins with what it kept, and counts only what is new", async () => {
  const client = clientOf(SERVER);
  const parent = client.create({ input: "count", max_output_tokens: 12 });
  await parent.done;
  const fork = client.fork(parent.id as string, { at: 5 }, { max_output_tokens: 4 });
  const seen: number[] = [];
  fork.on("delta", () => seen.push(fork.tokens));
  await fork.done;
  // the fake model counts from 1 again
  expect(numbers(fork.text)).toEqual([1, 2, 3, 4, 5, 1, 2, 3, 4]);
  expect(parent.text.startsWith(" 1 2 3 4 5")).toBe(true);
  expect([seen[0], seen.at(-1), fork.tokens]).toEqual([0, 4, 4]);
  expect(fork.response?.previous_response_id).toBe(parent.id);
});

test("a second client follows the same answer, from the beginning or from a number", async () => {
  const first = clientOf(SERVER).create({ input: "count", max_output_tokens: 150 });
  await reached(first, 40);
  const second = clientOf(SERVER);
  const whole = second.resume({ id: first.id as string });
  const rest = second.resume({ id: first.id as string, after: first.sequence, text: first.text });
  await Promise.all([first.done, whole.done, rest.done]);
  for (const stream of [first, whole, rest]) expectCounting(stream);
  expect([whole.text, rest.text]).toEqual([first.text, first.text]);
  const nothing = second.resume({ id: "resp_000000000000000000000000" });
  await nothing.done;
  expect([nothing.status, nothing.error?.code]).toEqual(["gone", "gone"]);
});

test("steering goes on in a successor", async () => {
  const stream = clientOf(SERVER).create({ input: "count", max_output_tokens: 5000 });
  await reached(stream, 5);
  const next = await stream.steer("count to 4");
  await Promise.all([stream.done, next.done]);
  expect([stream.status, next.status, numbers(next.text)]).toEqual(["incomplete", "completed", [1, 2, 3, 4]]);
});

test("as an iterator it gives the text, and throws what went wrong", async () => {
  const client = clientOf(SERVER);
  let text = "";
  for await (const piece of client.create({ input: "count to 20" })) text += piece;
  expect(numbers(text)).toHaveLength(20);
  await expect(async () => {
    for await (const piece of client.create({ input: "hi", top_p: 7 })) text += piece;
  }).rejects.toBeInstanceOf(ClientError);
});

describe("where no WebSocket gets through", () => {
  test("it goes on over SSE, cut or not, with lanes and cancel", async () => {
    const between = await relay(true);
    const client = clientOf(between.url);
    const streams = ["x", "x", "y"].map((lane) => client.create({ input: "count", max_output_tokens: 200 }, { lane }));
    for (const tokens of [20, 110]) {
      await reached(streams[2] as ResponseStream, tokens);
      between.cut();
    }
    const endless = client.create({ input: "count", max_output_tokens: 50_000 });
    await reached(endless, 5);
    endless.cancel();
    await Promise.all([...streams, endless].map((stream) => stream.done));
    for (const stream of streams) {
      expectCounting(stream);
      expect(stream.tokens).toBe(200);
    }
    expect(client.state).toEqual({ name: "connected", transport: "sse" });
    expect(endless.status).toBe("cancelled");
    expectCounting(endless);
  });

  test("refusals and forgotten ids are reported", async () => {
    const client = clientOf(SERVER, { transport: "sse" });
    const refused = client.create({ input: "hi", temperature: -1 });
    const gone = client.resume({ id: "resp_000000000000000000000000" });
    await Promise.all([refused.done, gone.done]);
    expect([refused.error?.param, gone.status]).toEqual(["temperature", "gone"]);
  });
});

test("a key opens a socket by a ticket; none, or a wrong one, locks it", async () => {
  const client = clientOf(KEYED);
  const locked = new Promise<string>((resolve) => client.on("state", (state) => state.name === "locked" && resolve(state.reason)));
  expect(await locked).toBe("missing");
  client.setKey(KEY);
  const stream = client.create({ input: "count to 5" });
  await stream.done;
  expect([stream.status, client.state]).toEqual(["completed", { name: "connected", transport: "websocket" }]);
});

test("the engine's snapshots come while it works and stop with the last follower", async () => {
  const client = clientOf(SERVER);
  await connected(client);
  const stream = client.create({ input: "count", max_output_tokens: 5000 });
  const body = await new Promise<EngineBody>((resolve) => {
    const stop = client.followEngine((seen) => {
      if (!seen.scheduler.requests.some((request) => request.request_id === stream.id)) return;
      stop();
      resolve(seen);
    });
  });
  expect(body.scheduler.device.num_blocks).toBe(body.engine.step.blocks_total);
  stream.cancel();
  await stream.done;
});
