/** Rates from the counts of two snapshots. Pure. */

import type { StepStats } from "../../client/index.ts";
import type { Frame } from "./frames.ts";

/** Between a snapshot and the one before. null: nothing could be measured. */
export interface Sample {
  at: number;
  tokensPerS: number;
  running: number;
  waiting: number;
  stepMs: number | null;
  /** Prompt tokens that were computed, and those found in the cache. */
  prompt: number;
  hits: number;
}

const HITS_OVER_MS = 5000;

export function sampleOf(frame: Frame, before: Frame | null): Sample {
  const now = frame.body.scheduler.stats;
  const then = before?.body.scheduler.stats ?? now;
  const seconds = Math.max(0.001, (frame.at - frame.from) / 1000);
  const steps = now.steps - then.steps;
  // else the engine was idle for part of the time
  const wasBusy = then.running > 0 && now.running > 0;
  return {
    at: frame.at,
    tokensPerS: (now.generated_tokens - then.generated_tokens) / seconds,
    running: now.running,
    waiting: now.waiting + now.preempted + now.swapped,
    stepMs: steps > 0 && wasBusy ? (seconds * 1000) / steps : null,
    prompt: promptTokens(now) - promptTokens(then),
    hits: now.prefix_hit_tokens - then.prefix_hit_tokens,
  };
}

/** The sample for a gap between snapshots, in which nothing happened. */
export function quietSample(at: number, before: Frame): Sample {
  const { running, waiting, preempted, swapped } = before.body.scheduler.stats;
  return { at, tokensPerS: 0, running, waiting: waiting + preempted + swapped, stepMs: null, prompt: 0, hits: 0 };
}

/** Tokens computed that were known already. */
const promptTokens = (stats: StepStats): number => Math.max(0, stats.computed_tokens - stats.generated_tokens);

/** The share of all prompt tokens since the start found in the cache; null before any. */
export function hitRate(stats: StepStats): number | null {
  const all = promptTokens(stats) + stats.prefix_hit_tokens;
  return all > 0 ? stats.prefix_hit_tokens / all : null;
}

/** The same over the last HITS_OVER_MS before sample `index`. */
export function recentHitRate(samples: readonly Sample[], index: number): number | null {
  const end = samples[index]?.at ?? 0;
  let all = 0;
  let hits = 0;
  for (let i = index; i >= 0; i -= 1) {
    const sample = samples[i];
    if (!sample || sample.at <= end - HITS_OVER_MS) break;
    all += sample.prompt + sample.hits;
    hits += sample.hits;
  }
  return all > 0 ? hits / all : null;
}

/** A round number at or above `value`: 1, 2 or 5 times a power of ten. */
export function ceiling(value: number): number {
  if (value <= 0) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((times) => times * power).find((top) => top >= value) ?? value;
}
