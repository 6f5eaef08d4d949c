/**
 * The engine's state, followed while the pane is open and the tab in front.
 *
 * Snapshots come four a second and go into the playback, which decides at each screen frame what is
 * shown; the parts of the view follow the signals here.
 */

import { batch, computed, effect, signal } from "@preact/signals";
import { client, isConnected } from "../../app/connection.ts";
import type { EngineBody } from "../../client/index.ts";
import { frameOf, type Frame, type PoolName } from "./frames.ts";
import { answers, isLoading } from "../load/load.ts";
import { Playback } from "./playback.ts";
import { quietSample, sampleOf, type Sample } from "./rates.ts";
import { Timeline } from "../timeline/model.ts";

const MAX_SAMPLES = 1024;

export const playback = new Playback();
export const timeline = new Timeline();
export const samples: Sample[] = [];

/** The shown snapshot, and where the timeline ends; the latter may change 60 times a second. */
export const shown = signal<Frame | null>(null);
export const column = signal(0);
/** Rises with each snapshot. */
export const numSnapshots = signal(0);
/** Rises when the user or the clock changed the playback. */
export const mode = signal(0);
export const fault = signal("");
/** The block and the request under the pointer. */
export const spot = signal<{ pool: PoolName; block: number } | null>(null);
export const chosen = signal<number | null>(null);

const isVisible = signal(document.visibilityState === "visible");
document.addEventListener("visibilitychange", () => (isVisible.value = document.visibilityState === "visible"));
const reducedMotion = matchMedia("(prefers-reduced-motion: reduce)");
const isWatching = computed(() => isConnected.value && isVisible.value);

let newest: Frame | null = null;
let ticking = 0;

/** Start following the engine; the returned function ends it. */
export function watchEngine(): () => void {
  let stop = (): void => undefined;
  steer((player) => player.goLive()); // whatever its last mode was
  const end = effect(() => {
    stop();
    stop = isWatching.value ? client.followEngine(receive, (error) => (fault.value = error.message)) : () => undefined;
  });
  return () => {
    end();
    stop();
    cancelAnimationFrame(ticking);
    ticking = 0;
    spot.value = chosen.value = null;
  };
}

function receive(body: EngineBody): void {
  if (newest && body.scheduler.step < newest.body.scheduler.step) forget(); // another server
  const frame = frameOf(body, performance.now(), newest, isLoading.value ? answers.value : null);
  timeline.add(body.scheduler.steps, body.scheduler.requests);
  frame.column = timeline.end;
  if (newest && frame.from > newest.at) samples.push(quietSample(frame.from, newest));
  samples.push(sampleOf(frame, newest));
  samples.splice(0, samples.length - MAX_SAMPLES);
  newest = frame;
  playback.push(frame);
  numSnapshots.value += 1;
  fault.value = "";
  schedule();
}

function forget(): void {
  playback.clear();
  timeline.clear();
  samples.length = 0;
  newest = null;
}

function schedule(): void {
  if (!ticking) ticking = requestAnimationFrame(tick);
}

function tick(): void {
  ticking = 0;
  playback.tick(performance.now());
  if (reducedMotion.matches) playback.jump();
  batch(() => {
    shown.value = playback.shown;
    column.value = reducedMotion.matches ? (playback.shown?.column ?? 0) : playback.column;
  });
  if (playback.isMoving) schedule();
}

/** Change the playback, and show the result. */
export function steer(change: (playback: Playback) => void): void {
  change(playback);
  mode.value += 1;
  schedule();
}
