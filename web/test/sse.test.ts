import { expect, test } from "vitest";
import { backoffMs, RECONNECT_CODES } from "../src/client/transport/backoff.ts";
import { readSse, type SseEvent } from "../src/client/transport/sse.ts";

const BODY = ': keep-alive\nid: 4\nevent: a\ndata: {"x": "é"}\n\ndata: one\ndata: two\n\nid: 5\ndata: cut';

async function read(size: number): Promise<SseEvent[]> {
  const bytes = new TextEncoder().encode(BODY);
  const body = new ReadableStream<Uint8Array>({
    start(controller) {
      for (let at = 0; at < bytes.length; at += size) controller.enqueue(bytes.slice(at, at + size));
      controller.close();
    },
  });
  const events: SseEvent[] = [];
  for await (const event of readSse(body)) events.push(event);
  return events;
}

test.each([1, 2, 3, 7, 1000])("events are whole in chunks of %i bytes", async (size) => {
  expect(await read(size)).toEqual([
    { id: "4", event: "a", data: '{"x": "é"}' },
    { id: "", event: "", data: "one\ntwo" },
  ]);
});

test("waiting doubles from half a second to eight, with a quarter of chance", () => {
  const middle = [0, 1, 2, 3, 4, 5, 50].map((attempt) => backoffMs(attempt, () => 0.5));
  expect(middle).toEqual([500, 1000, 2000, 4000, 8000, 8000, 8000]);
  expect(backoffMs(0, () => 0)).toBe(375);
  expect(backoffMs(9, () => 1)).toBe(10_000);
  expect([...RECONNECT_CODES].some((code) => code >= 4400)).toBe(false);
});
