/**
 * The engine view's logic: decoding and playback of snapshots, cells, rates, the timeline, the
 * load.
 */

import { expect, test } from "vitest";
import type { EngineBody, RequestView, StepStats, StepView } from "../src/client/index.ts";
import { countStates, describe, frameOf, idsOf, ownersOf, stateOf, type Frame } from "../src/engine/snapshots/frames.ts";
import { cellAt, fit, moved, placeOf } from "../src/engine/blocks/layout.ts";
import { sizesFor } from "../src/engine/load/sizes.ts";
import { MAX_FRAMES, Playback } from "../src/engine/snapshots/playback.ts";
import { ceiling, hitRate, recentHitRate, sampleOf } from "../src/engine/snapshots/rates.ts";
import { factsOf } from "../src/engine/facts.ts";
import { MAX_COLUMNS, seenFrom, Timeline } from "../src/engine/timeline/model.ts";

const packed = (bytes: Iterable<number>): string => Buffer.from(Uint8Array.from(bytes)).toString("base64");
const table = (ids: number[]): string => Buffer.from(Uint32Array.from(ids).buffer).toString("base64");

const STATS = { running: 0, waiting: 0, preempted: 0, swapped: 0, steps: 0, computed_tokens: 0, generated_tokens: 0, prefix_hit_tokens: 0 } as StepStats;

function request(number: number, blocks: number[], more: Partial<RequestView> = {}): RequestView {
  const sequence = { choice: 0, tokens: 40, computed: 20, num_blocks: blocks.length, blocks: table(blocks), num_host_blocks: 0, host_blocks: "" };
  return { number, request_id: `r${number}`, status: "running", is_held: false, sequences: [sequence], ...more } as RequestView;
}

function body(cells: number[], requests: RequestView[] = [], stats: Partial<StepStats> = {}): EngineBody {
  const device = { num_blocks: cells.length, blocks_per_cell: 1, cells: packed(cells) };
  const host = { num_blocks: 2, blocks_per_cell: 1, cells: packed([0, 4]) };
  return { scheduler: { step: 1, stats: { ...STATS, ...stats }, block_size: 16, device, host, requests, unlisted: {}, steps: [] } } as unknown as EngineBody;
}

const step = (number: number, more: Partial<StepView> = {}): StepView =>
  ({ number, tokens: 1, prefilled: [], decoded: [], verified: [], admitted: [], paused: [], preempted: [], finished: [], others: 0, ...more }) as StepView;

// ---------------------------------------------------------------- snapshots

test("a cell of several blocks has the state of its busiest", () => {
  expect([0, 1, 2, 3, 4, 5, 8, 15].map(stateOf)).toEqual(["free", "cached", "leaving", "leaving", "private", "private", "shared", "shared"]);
  expect(countStates(Uint8Array.of(0, 1, 1, 2, 4, 8, 8))).toEqual({ free: 1, cached: 2, leaving: 1, private: 1, shared: 2 });
});

test("ids are four bytes each, little-endian", () => {
  expect([...idsOf(packed([1, 0, 0, 0, 0, 2, 1, 0]))]).toEqual([1, 0x010200]);
});

test("a block names its owners, and the tokens they keep in it", () => {
  const frame = frameOf(body([8, 4, 1, 0, 4], [request(7, [0, 1]), request(9, [0])]), 0, null);
  expect(ownersOf(frame, "device", 0).map(({ table }) => table.name)).toEqual(["#7", "#9"]);
  expect(describe(frame, "device", 0)).toBe("Block 0 · shared · reference count 2 · #7, #9 (tokens 1 to 16)");
  expect(describe(frame, "device", 1)).toBe("Block 1 · private · reference count 1 · #7 (tokens 17 to 20)");
  expect(describe(frame, "device", 2)).toContain("cached");
  expect(describe(frame, "device", 3)).toBe("Block 3 · free");
  expect(describe(frame, "device", 4)).toContain("not listed");
  expect(describe(frame, "host", 1)).toContain("Host block 1 · swapped out");
});

test("a look's steps happened since the one before, or in the last quarter second", () => {
  const first = frameOf(body([0]), 1000, null);
  const second = frameOf(body([0]), 1260, first);
  const late = frameOf(body([0]), 9000, second);
  expect([first.from, second.from, late.from]).toEqual([750, 1000, 8750]);
  const together = frameOf(body([0]), 9001, late); // delayed, then together: no rate of thousands
  expect([together.from, together.at]).toEqual([9000, 9240]);
});

// ---------------------------------------------------------------- the grid

test.each([
  [64, 960],
  [16_384, 960],
  [16_384, 330],
  [65_536, 960],
  [1, 5],
])("%i cells in %i pixels: all inside, each found where it is", (count, width) => {
  const layout = fit(count, width, 300);
  expect(layout.columns * layout.rows).toBeGreaterThanOrEqual(count);
  if (width >= layout.pitch) expect(layout.columns * layout.pitch).toBeLessThanOrEqual(width);
  for (const cell of [0, 1, layout.columns, count >> 1, count - 1].filter((at) => at < count)) {
    const { x, y } = placeOf(layout, cell);
    expect(cellAt(layout, x, y)).toBe(cell);
    expect(cellAt(layout, x + layout.pitch - 0.1, y + layout.pitch - 0.1)).toBe(cell);
  }
  expect(cellAt(layout, layout.columns * layout.pitch + 1, 0)).toBeNull();
  expect(cellAt(layout, 0, layout.height + 1)).toBeNull();
});

test("the arrow keys stay on the grid", () => {
  const layout = fit(10, 4 * 22, 300);
  expect(layout.columns).toBe(4);
  const keys = ["ArrowRight", "ArrowLeft", "ArrowDown", "ArrowUp", "Home", "End", "PageUp", "PageDown"];
  expect(keys.map((key) => moved(layout, 5, key))).toEqual([6, 4, 9, 1, 4, 7, 1, 9]);
  expect(keys.map((key) => moved(layout, 9, key))).toEqual([9, 8, 9, 5, 8, 9, 1, 9]);
  expect(moved(layout, 5, "Tab")).toBeNull();
});

// ---------------------------------------------------------------- playback

function looks(count: number): Frame[] {
  const frames: Frame[] = [];
  for (let i = 0; i < count; i += 1) {
    const frame = frameOf(body([0]), (i + 1) * 250, frames.at(-1) ?? null);
    frame.column = (i + 1) * 10;
    frames.push(frame);
  }
  return frames;
}

function played(count: number): Playback {
  const playback = new Playback();
  for (const frame of looks(count)) playback.push(frame);
  return playback;
}

test("live is a look behind, and its steps pass one by one", () => {
  const playback = played(4); // at 250, 500, 750, 1000
  playback.tick(1050);
  expect(playback.shown?.at).toBe(750);
  playback.tick(1175); // 875: half way to the snapshot at 1000
  expect(playback.column).toBeCloseTo(35);
  playback.tick(1300);
  expect([playback.shown?.at, playback.column, playback.isMoving]).toEqual([1000, 40, false]);
});

test("paused, nothing moves whatever comes; slow, it goes on from there", () => {
  const playback = played(8);
  playback.tick(1300);
  playback.pause();
  playback.tick(60_000);
  expect([playback.shown?.at, playback.column]).toEqual([1000, 40]);
  playback.play(1 / 4);
  playback.tick(60_000);
  playback.tick(60_500); // an eighth of a second of it
  expect(playback.column).toBeCloseTo(45);
  playback.tick(61_000);
  expect(playback.shown?.at).toBe(1250);
  expect(playback.isLive).toBe(false);
  playback.goLive();
  playback.tick(62_000);
  expect([playback.shown?.at, playback.behind]).toEqual([2000, 0]);
});

test("quiet time is not replayed", () => {
  const playback = played(2);
  const late = frameOf(body([0]), 60_000, playback.frames.at(-1) ?? null);
  playback.push(late);
  playback.tick(0);
  playback.seek(1);
  playback.play(1 / 4);
  playback.tick(1000); // 250 ms of it, all of the late snapshot
  playback.tick(2000);
  expect(playback.shown).toBe(late);
});

test("the buffer forgets its oldest, also under a paused reader", () => {
  const playback = played(MAX_FRAMES);
  playback.seek(0);
  const next = frameOf(body([0]), 1e6, null);
  playback.push(next);
  expect(playback.frames.length).toBe(MAX_FRAMES);
  expect(playback.shown).toBe(playback.frames[0]);
  playback.seek(MAX_FRAMES);
  expect(playback.shown).toBe(next);
});

// ---------------------------------------------------------------- rates

test("rates are what happened between two looks", () => {
  const before = frameOf(body([0], [], { running: 2, steps: 10, generated_tokens: 100, computed_tokens: 300 }), 1000, null);
  const after = frameOf(body([0], [], { running: 2, waiting: 1, swapped: 1, steps: 15, generated_tokens: 110, computed_tokens: 340, prefix_hit_tokens: 10 }), 1250, before);
  expect(sampleOf(after, before)).toEqual({ at: 1250, tokensPerS: 40, running: 2, waiting: 2, stepMs: 50, prompt: 30, hits: 10 });
  expect(sampleOf(before, null)).toMatchObject({ tokensPerS: 0, stepMs: null });
  expect(hitRate(after.body.scheduler.stats)).toBeCloseTo(10 / 240);
  expect(hitRate(STATS)).toBeNull();
});

test("the recent share of hits looks back five seconds", () => {
  const at = (ms: number, prompt: number, hits: number) => ({ at: ms, tokensPerS: 0, running: 1, waiting: 0, stepMs: null, prompt, hits });
  const samples = [at(0, 100, 0), at(4000, 10, 30), at(8000, 30, 10), at(20_000, 0, 0)];
  expect([0, 1, 2, 3].map((i) => recentHitRate(samples, i))).toEqual([0, 30 / 140, 40 / 80, null]);
});

test("scales end at round numbers", () => {
  expect([0, 0.3, 1, 3, 7, 42, 500, 501].map(ceiling)).toEqual([1, 0.5, 1, 5, 10, 50, 500, 1000]);
});

// ---------------------------------------------------------------- the timeline

test("what a request does in successive steps is one run, and waiting shows till it is admitted", () => {
  const timeline = new Timeline();
  timeline.add([step(1, { prefilled: [[1, 30]] }), step(2, { decoded: [1] })], [request(1, []), request(2, [], { status: "waiting" })]);
  timeline.add([step(3, { decoded: [1] }), step(4, { decoded: [1], prefilled: [[2, 8]], admitted: [2] })], [request(1, []), request(2, [])]);
  expect(timeline.lanes.map((lane) => lane.runs.map(({ kind, from, to, tokens }) => [kind, from, to, tokens]))).toEqual([
    [["prefill", 0, 1, 30], ["decode", 1, 4, 3]],
    [["waiting", 2, 3, 0], ["prefill", 3, 4, 8]],
  ]);
});

test("swapped, dropped and paused last until it is admitted again", () => {
  const timeline = new Timeline();
  const all = [1, 2, 3].map((number) => request(number, []));
  timeline.add([step(1, { decoded: [1, 2, 3] }), step(2, { decoded: [3], preempted: [[1, "swap"], [2, "recompute"]] }), step(3, { paused: [3] })], all);
  timeline.add([step(4), step(5, { decoded: [1], prefilled: [[2, 9]], admitted: [1, 2] })], all);
  expect(timeline.lanes.map((lane) => lane.runs.map(({ kind, from, to }) => [kind, from, to]))).toEqual([
    [["decode", 0, 1], ["swapped", 1, 4], ["decode", 4, 5]],
    [["decode", 0, 1], ["dropped", 1, 4], ["prefill", 4, 5]],
    [["decode", 0, 2], ["paused", 2, 5]],
  ]);
});

test("a lane is taken again when its request has ended, and a choice that goes on keeps its own", () => {
  const timeline = new Timeline();
  timeline.add([step(1, { decoded: [1, 2, 2] }), step(2, { decoded: [2], finished: [[1, "stop"], [2, "stop"]] }), step(3, { decoded: [2, 3] })], [request(2, []), request(3, [])]);
  expect(timeline.lanes.map((lane) => lane.runs.map(({ request, from, to }) => [request, from, to]))).toEqual([[[1, 0, 1], [3, 2, 3]], [[2, 0, 3]]]);
  timeline.add([], []); // 2 and 3 were cancelled
  timeline.add([step(4, { decoded: [4] })], [request(4, [])]);
  expect(timeline.lanes.length).toBe(2);
});

test("an old look shows no lane, step or token that came after it", () => {
  const timeline = new Timeline();
  timeline.add([step(1, { prefilled: [[1, 30]] }), step(2, { decoded: [1] }), step(3, { decoded: [1, 2], prefilled: [[3, 9]] })], [1, 2, 3].map((number) => request(number, [])));
  timeline.add([step(4, { decoded: [1], prefilled: [[3, 9]] })], [request(1, []), request(3, [])]);
  expect([1, 2, 3, 4].map((end) => timeline.lanesBefore(end))).toEqual([1, 1, 3, 3]);
  const [prefill, decode] = timeline.lanes[0]!.runs;
  expect(seenFrom(prefill!, 3)).toEqual({ steps: 1, tokens: 30 });
  expect(seenFrom(decode!, 2)).toEqual({ steps: 1, tokens: 1 });
  expect(seenFrom(timeline.lanes.find((lane) => lane.request === 3)!.runs[0]!, 3)).toEqual({ steps: 1, tokens: null });
});

test("a look keeps what the small load had come to, and whether it shared a block so far", () => {
  const frames = [[0], [8], [1]].reduce<Frame[]>((all, cells, i) => [...all, frameOf(body(cells), i * 250, all.at(-1) ?? null, i)], []);
  expect(frames.map((frame) => frame.load)).toEqual([{ answers: 0, hasShared: false }, { answers: 1, hasShared: true }, { answers: 2, hasShared: true }]);
  expect(frameOf(body([0]), 9000, frames[2]!).load).toBeNull();
});

test("steps that were not recorded leave a mark, and old ones are forgotten", () => {
  const timeline = new Timeline();
  timeline.add([step(1), step(2), step(9)], []);
  expect([0, 1, 2].map((at) => timeline.column(at)?.isAfterGap)).toEqual([false, false, true]);
  timeline.add(Array.from({ length: MAX_COLUMNS }, (_, i) => step(10 + i, { decoded: [i < 5 ? 1 : 2] })), [request(2, [])]);
  expect([timeline.end, timeline.column(2), timeline.column(3)?.number]).toEqual([MAX_COLUMNS + 3, undefined, 10]);
  timeline.add(Array.from({ length: 5 }, (_, i) => step(20_000 + i, { decoded: [2] })), [request(2, [])]);
  expect(timeline.lanes.map((lane) => lane.runs.length)).toEqual([0, 1]);
});

// ---------------------------------------------------------------- the load

test("the load is larger than a small pool, and a corner of a large one", () => {
  const needed = (pool: number, context: number) => {
    const { system, answer, long } = sizesFor(pool, context);
    return 5 * answer + 2 * long + system;
  };
  expect(needed(1024, 1 << 24)).toBeGreaterThan(1024);
  expect(needed(16_384 * 16, 1024)).toBeLessThan(16_384);
  const { system, answer } = sizesFor(1024, 1024);
  expect(system + answer).toBeLessThan(1024);
});

test("steps that verify proposed tokens are a run of their own, with what they computed", () => {
  const timeline = new Timeline();
  timeline.add([step(1, { decoded: [1] }), step(2, { verified: [[1, 5]] }), step(3, { verified: [[1, 3]] }), step(4, { decoded: [1] })], [request(1, [])]);
  const runs = timeline.lanes[0]?.runs.map(({ kind, from, to, tokens }) => [kind, from, to, tokens]);
  expect(runs).toEqual([["decode", 0, 1, 1], ["verify", 1, 3, 8], ["decode", 3, 4, 1]]);
});

test("failed steps are shown once there are any", () => {
  const shown = (rebuilds: number) => factsOf({ ...STATS, rebuilds }, 1).filter(([name]) => name === "Failed steps");
  expect(shown(0)).toEqual([]);
  expect(shown(2)).toEqual([["Failed steps", "2", "all was computed again"]]);
});
