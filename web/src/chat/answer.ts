/**
 * Answer: a ResponseStream as the page shows it.
 *
 * The stream's events come by the hundred a second; signals change once a frame. What is drawn
 * depends on the signals alone, so a component needs to know nothing of streams.
 */

import { signal } from "@preact/signals";
import type { ClientError, Progress, ResponseStream, StreamStatus } from "../client/index.ts";

export interface Figures {
  tokens: number;
  tokensPerS: number;
  firstMs: number | null;
  cachedTokens: number;
}

const NOTHING: Figures = { tokens: 0, tokensPerS: 0, firstMs: null, cachedTokens: 0 };

export class Answer {
  readonly text = signal("");
  readonly status = signal<StreamStatus>("sending");
  readonly progress = signal<Progress>({});
  readonly figures = signal<Figures>(NOTHING);
  readonly error = signal<ClientError | null>(null);
  readonly isLive = signal(true);
  readonly isStopping = signal(false);
  /** What it is drawn from; replaced when the question is asked again with another limit. */
  stream: ResponseStream;
  #frame = 0;
  #off: (() => void)[] = [];

  constructor(stream: ResponseStream, onEnd: (answer: Answer) => void) {
    this.stream = stream;
    this.follow(stream, onEnd);
  }

  follow(stream: ResponseStream, onEnd: (answer: Answer) => void): void {
    for (const off of this.#off) off();
    this.stream = stream;
    const soon = () => (this.#frame ||= requestAnimationFrame(() => this.#draw()));
    this.#off = [
      stream.on("delta", soon),
      stream.on("status", soon),
      stream.on("end", () => {
        cancelAnimationFrame(this.#frame);
        onEnd(this);
      }),
    ];
  }

  stop(): void {
    if (!this.isLive.value) return;
    this.isStopping.value = true;
    this.stream.cancel();
  }

  /** Nothing follows: show all of it. */
  settle(): void {
    this.#draw();
    this.error.value = this.stream.error;
    this.isLive.value = false;
  }

  #draw(): void {
    this.#frame = 0;
    const { stream } = this;
    this.text.value = stream.text;
    this.status.value = stream.status;
    this.progress.value = stream.progress;
    this.figures.value = figuresOf(stream);
  }
}

function figuresOf(stream: ResponseStream): Figures {
  const { sent, first, last } = stream.times;
  if (first === null || last === null) return { ...NOTHING, tokens: stream.tokens };
  const perToken = stream.timing?.per_token_s;
  const seconds = (last - first) / 1000;
  const seen = stream.tokens > 1 && seconds > 0 ? (stream.tokens - 1) / seconds : 0;
  return {
    tokens: stream.tokens,
    tokensPerS: perToken ? 1 / perToken : seen,
    firstMs: first - sent,
    cachedTokens: stream.usage?.cached_tokens ?? 0,
  };
}
