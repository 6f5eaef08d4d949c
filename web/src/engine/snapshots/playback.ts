/**
 * Which of the buffered snapshots is shown: live, in slow motion, or paused.
 *
 * Live means one snapshot behind the newest, so that the steps between two can pass one by one.
 * The time is an argument; no clock is read here.
 */

import { INTERVAL_MS, type Frame } from "./frames.ts";

export const MAX_FRAMES = 480; // two minutes of a busy engine
const DELAY_MS = INTERVAL_MS + 50;

export class Playback {
  readonly frames: Frame[] = [];
  /** Follows the newest snapshot. */
  isLive = true;
  isPlaying = true;
  speed = 1;
  #index = -1;
  #position = 0;
  #clock: number | null = null;

  get shown(): Frame | null {
    return this.frames[this.#index] ?? null;
  }

  get index(): number {
    return this.#index;
  }

  /** Distance behind the newest snapshot, in ms. */
  get behind(): number {
    return Math.max(0, (this.frames.at(-1)?.at ?? 0) - (this.shown?.at ?? 0));
  }

  /** Whether the display will change with time, without a new snapshot. */
  get isMoving(): boolean {
    return this.isPlaying && this.#index < this.frames.length - 1;
  }

  push(frame: Frame): void {
    this.frames.push(frame);
    if (this.#index < 0) this.#show(0);
    if (this.frames.length <= MAX_FRAMES) return;
    this.frames.shift();
    if (this.#index > 0) this.#index -= 1;
    else this.#show(0); // the shown one was dropped: show the oldest left
  }

  clear(): void {
    this.frames.length = 0;
    this.#index = -1;
    this.goLive();
  }

  goLive(): void {
    this.isLive = this.isPlaying = true;
    this.speed = 1;
  }

  /** Play at this speed from the shown snapshot; 1 is the engine's. */
  play(speed: number): void {
    this.isPlaying = true;
    this.speed = speed;
    if (speed !== 1 || this.behind > 2 * DELAY_MS) this.isLive = false;
    else this.isLive = true;
  }

  pause(): void {
    this.isLive = this.isPlaying = false;
  }

  seek(index: number): void {
    this.pause();
    this.#show(Math.max(0, Math.min(this.frames.length - 1, index)));
  }

  /** Advance to the time `now`, in ms. */
  tick(now: number): void {
    const passed = now - (this.#clock ?? now);
    this.#clock = now;
    if (!this.isPlaying) return;
    this.#position = this.isLive ? now - DELAY_MS : this.#position + passed * this.speed;
    for (let next = this.#next; next && this.#position >= next.at; next = this.#next) this.#index += 1;
    const next = this.#next;
    if (this.isLive) return;
    if (!next) this.#position = this.shown?.at ?? 0;
    else this.#position = Math.max(this.#position, next.from); // no step in between
  }

  /** Show the newest at once, without the steps between: for reduced motion. */
  jump(): void {
    if (this.isLive) this.#show(this.frames.length - 1);
  }

  /** Where the timeline ends: a column, fractional. */
  get column(): number {
    const shown = this.shown;
    const next = this.#next;
    if (!shown) return 0;
    if (!next || this.#position <= next.from) return shown.column;
    const part = (this.#position - next.from) / (next.at - next.from);
    return shown.column + (next.column - shown.column) * Math.min(1, part);
  }

  get #next(): Frame | undefined {
    return this.frames[this.#index + 1];
  }

  #show(index: number): void {
    this.#index = index;
    this.#position = this.shown?.at ?? 0;
  }
}
