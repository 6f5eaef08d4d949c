/**
 * The batch, step by step: each request in a lane, as runs of columns in which it did the same.
 *
 * A column is a recorded step; where step numbers are missing before it, it has `isAfterGap`. A
 * lane is reused when its request has ended. Pure.
 */

import type { RequestView, StepView } from "../../client/index.ts";

export const KINDS = ["prefill", "decode", "verify", "waiting", "paused", "swapped", "dropped"] as const;
export type Kind = (typeof KINDS)[number];

export const MAX_COLUMNS = 32_768; // two minutes at 270 steps a second

/** Columns `from` up to `to`, exclusive; `tokens` were computed in them. */
export interface Run {
  request: number;
  kind: Kind;
  from: number;
  to: number;
  tokens: number;
}

/** A run as seen from column `end`; null for tokens that a later step may have computed. */
export function seenFrom(run: Run, end: number): { steps: number; tokens: number | null } {
  const steps = Math.min(run.to, Math.ceil(end)) - run.from;
  if (run.to <= end) return { steps, tokens: run.tokens };
  return { steps, tokens: run.kind === "decode" ? steps : null };
}

export interface Column {
  number: number;
  tokens: number;
  isAfterGap: boolean;
}

/** `request`: the lane's current or last request. */
interface Lane {
  request: number;
  runs: Run[];
}

export class Timeline {
  readonly lanes: Lane[] = [];
  #columns: Column[] = [];
  #dropped = 0;
  readonly #open = new Map<number, Lane>();
  readonly #held = new Map<number, Kind>(); // requests that compute nothing, and why

  /** Columns ever added. */
  get end(): number {
    return this.#dropped + this.#columns.length;
  }

  column(index: number): Column | undefined {
    return this.#columns[index - this.#dropped];
  }

  /** Lanes up to the last one with a run before column `end`; later runs are not shown there. */
  lanesBefore(end: number): number {
    return this.lanes.findLastIndex(({ runs }) => runs.some((run) => run.from < end)) + 1;
  }

  /** Add the steps of one snapshot, and the requests that are live after them. */
  add(steps: readonly StepView[], requests: readonly RequestView[]): void {
    for (const step of steps) this.#step(step);
    const live = new Set(requests.map((request) => request.number));
    for (const number of this.#open.keys()) if (!live.has(number)) this.#open.delete(number);
    for (const number of this.#held.keys()) if (!live.has(number)) this.#held.delete(number);
    for (const { number, status } of requests) {
      if (status === "waiting" && !this.#held.has(number)) this.#held.set(number, "waiting");
    }
    this.#forget();
  }

  clear(): void {
    this.lanes.length = this.#columns.length = this.#dropped = 0;
    this.#held.clear();
    this.#open.clear();
  }

  #step(step: StepView): void {
    const at = this.end;
    const previous = this.#columns.at(-1);
    const isAfterGap = previous !== undefined && step.number !== previous.number + 1;
    this.#columns.push({ number: step.number, tokens: step.tokens, isAfterGap });
    for (const [number, tokens] of step.prefilled) this.#mark(number, "prefill", at, tokens);
    for (const number of step.decoded) this.#mark(number, "decode", at, 1);
    for (const [number, tokens] of step.verified) this.#mark(number, "verify", at, tokens);
    for (const number of step.admitted) this.#held.delete(number);
    for (const number of step.paused) this.#held.set(number, "paused");
    for (const [number, how] of step.preempted) this.#held.set(number, how === "swap" ? "swapped" : "dropped");
    for (const [number] of step.finished) this.#held.delete(number);
    for (const [number, kind] of this.#held) this.#mark(number, kind, at, 0);
    for (const [number] of step.finished) this.#open.delete(number);
  }

  #mark(request: number, kind: Kind, at: number, tokens: number): void {
    const { runs } = this.#laneOf(request);
    const last = runs.at(-1);
    // it already has a run in this step
    if (last?.request === request && last.to > at) last.tokens += tokens;
    else if (last?.request === request && last.kind === kind && last.to === at) {
      last.to = at + 1;
      last.tokens += tokens;
    } else runs.push({ request, kind, from: at, to: at + 1, tokens });
  }

  #laneOf(request: number): Lane {
    const own = this.#open.get(request);
    if (own) return own;
    const isFree = (lane: Lane) => this.#open.get(lane.request) !== lane;
    // its own lane again if one choice ended and another goes on
    let lane = this.lanes.find((lane) => lane.request === request) ?? this.lanes.find(isFree);
    if (!lane) this.lanes.push((lane = { request, runs: [] }));
    lane.request = request;
    this.#open.set(request, lane);
    return lane;
  }

  #forget(): void {
    const spare = this.#columns.length - MAX_COLUMNS;
    if (spare <= 0) return;
    this.#columns = this.#columns.slice(spare);
    this.#dropped += spare;
    for (const lane of this.lanes) lane.runs = lane.runs.filter((run) => run.to > this.#dropped);
  }
}
