/**
 * Answer: a response as the page shows it, live or kept from before.
 *
 * Hundreds of stream events come a second; signals change once a frame. What is drawn depends on
 * the signals alone, so components do not use streams.
 */

import { computed, signal } from "@preact/signals";
import { ClientError, type Ask, type Fork, type Piece, type ResponseStream, type StreamStatus, type Progress } from "../../client/index.ts";
import type { Token } from "./tokens.ts";

export interface Figures {
  tokens: number;
  tokensPerS: number;
  firstMs: number | null;
  cachedTokens: number;
  /** Proposed before they were drawn, and right. Absent in answers of an earlier page. */
  acceptedTokens?: number;
  proposedTokens?: number;
  /** Of the tokens, those of its reasoning. */
  reasoningTokens?: number;
  /** What the model read for it; absent where not known. */
  inputTokens?: number;
}

/** The request without the conversation: enough to repeat it. */
export interface Origin {
  ask: Ask;
  fork: { id: string; at: Fork } | null;
  /** Tokens before its own: those kept by a fork or by earlier parts. */
  kept?: number;
}

/** An answer as stored in the database and in files. `after`: the last number seen. */
export interface KeptAnswer {
  responseId: string | null;
  after: number;
  text: string;
  /** Absent where the text is all there is. */
  pieces?: readonly Piece[];
  status: StreamStatus;
  fault: { message: string; code: string | null } | null;
  figures: Figures;
  seed: number | null;
  origin: Origin;
}

export interface Listener {
  /** It has an id now, so another tab can follow it. */
  created(answer: Answer): void;
  /** More text came: a time to store it, at intervals. */
  grown(answer: Answer): void;
  ended(answer: Answer): void;
}

const NOTHING: Figures = { tokens: 0, tokensPerS: 0, firstMs: null, cachedTokens: 0 };
const ENDS: ReadonlySet<StreamStatus> = new Set(["completed", "incomplete", "cancelled", "failed", "gone"]);
export const hasEnded = (status: StreamStatus): boolean => ENDS.has(status);
export const NEVER_SENT = "The page was closed before the server received this question. Ask it again.";

/** Tokens of a request that was too long, from the server's message: it has 3012, or at least 3000. */
export function refusedTokens(error: ClientError | null): { count: number; isAtLeast: boolean } | null {
  const found = error?.code === "context_length_exceeded" && /\bhas (at least )?(\d+)/.exec(error.message);
  return found ? { count: Number(found[2]), isAtLeast: found[1] !== undefined } : null;
}

export class Answer {
  readonly text = signal("");
  /** Reasoning, text and calls in order; an unchanged piece stays the same object. */
  readonly pieces = signal<readonly Piece[]>([]);
  /** Their kinds: changes with their number alone. */
  readonly kinds = computed(() => this.pieces.value.map(({ kind }) => kind).join(" ") || "text");
  readonly status = signal<StreamStatus>("sending");
  readonly progress = signal<Progress>({});
  readonly figures = signal<Figures>(NOTHING);
  readonly error = signal<ClientError | null>(null);
  readonly isLive = signal(false);
  readonly isStopping = signal(false);
  /** Token by token, once the user asked for it: see tokens.ts. */
  readonly tokens = signal<readonly Token[] | null>(null);
  /** Text before its own first token: kept by a fork from another answer. */
  prefix = "";
  /** Whether the tokens are shown in place of the text. */
  readonly isOpened = signal(false);
  /** Why the tokens can't be shown. */
  readonly tokensFault = signal("");
  origin: Origin;
  seed: number | null = null;
  responseId: string | null = null;
  stream: ResponseStream | null = null;
  /** The same answer generated again, for its tokens. */
  drawing: ResponseStream | null = null;
  #after = -1;
  /** The answer before it was continued. */
  #before: { kept: KeptAnswer; origin: Origin } | null = null;
  #isResumed = false;
  #frame = 0;
  #off: (() => void)[] = [];

  constructor(origin: Origin) {
    this.origin = origin;
  }

  /** From its record. An answer that was live waits to be followed by its id. */
  static of(kept: KeptAnswer): Answer {
    const answer = new Answer(kept.origin);
    answer.accept(kept);
    return answer;
  }

  accept(kept: KeptAnswer): void {
    this.responseId = kept.responseId;
    this.#after = kept.after;
    this.seed = kept.seed;
    this.text.value = kept.text;
    this.pieces.value = kept.pieces ?? (kept.text ? [{ kind: "text", text: kept.text, isDone: true }] : []);
    this.figures.value = kept.figures;
    const isLost = kept.responseId === null && !hasEnded(kept.status);
    this.status.value = isLost ? "gone" : kept.status;
    const fault = isLost ? { message: NEVER_SENT, code: "gone" } : kept.fault;
    this.error.value = fault ? new ClientError(fault.message, 0, fault.code) : null;
  }

  keep(): KeptAnswer {
    const error = this.error.value;
    const pieces = this.pieces.value;
    return {
      responseId: this.responseId,
      after: this.#after,
      text: this.text.value,
      ...(this.isPlain ? {} : { pieces }),
      status: this.status.value,
      fault: error ? { message: error.message, code: error.code } : null,
      figures: this.figures.value,
      seed: this.seed,
      origin: this.origin,
    };
  }

  /** Whether it was live when it was stored: `resume` then. */
  get isUnfinished(): boolean {
    return this.responseId !== null && !this.isLive.value && !hasEnded(this.status.value);
  }

  /** Whether there is nothing but text. */
  get isPlain(): boolean {
    return this.kinds.value === "text";
  }

  get calls(): Piece[] {
    return this.pieces.value.filter(({ kind }) => kind === "call");
  }

  /** Whether the server could continue it: it did not reach its own end. */
  get isCut(): boolean {
    return (this.status.value === "incomplete" || this.status.value === "cancelled") && this.responseId !== null && this.figures.value.tokens > 0;
  }

  /** Continue where it stopped: the stream's text begins with the present text. */
  extend(origin: Origin, stream: ResponseStream, listener: Listener): void {
    this.#before = { kept: this.keep(), origin: this.origin };
    this.origin = origin;
    this.tokens.value = null;
    this.isOpened.value = false;
    this.tokensFault.value = "";
    const { inputTokens = 0, tokens } = this.figures.value;
    this.figures.value = { ...NOTHING, inputTokens: inputTokens + tokens };
    this.follow(stream, listener);
  }

  follow(stream: ResponseStream, listener: Listener): void {
    for (const off of this.#off) off();
    this.stream = stream;
    this.#isResumed = stream.id !== null;
    this.isLive.value = true;
    this.error.value = null;
    if (!this.#isResumed) this.#draw();
    const soon = () => (this.#frame ||= requestAnimationFrame(() => (this.#draw(), listener.grown(this))));
    this.#off = [
      stream.on("created", () => (this.#draw(), listener.created(this))),
      stream.on("delta", soon),
      stream.on("piece", soon),
      stream.on("status", () => {
        const { total } = stream.progress; // prompt tokens, reported during prefill
        if (total) this.figures.value = { ...this.figures.value, inputTokens: total };
        soon();
      }),
      stream.on("end", () => {
        cancelAnimationFrame(this.#frame);
        listener.ended(this);
      }),
    ];
  }

  stop(): void {
    if (!this.isLive.value) return;
    this.isStopping.value = true;
    this.stream?.cancel();
  }

  /** The stream ended: show all of its text. */
  settle(): void {
    this.#draw();
    if (this.#before && this.stream?.pieces.length === 0) {
      this.origin = this.#before.origin; // no token came: the answer is unchanged
      this.accept(this.#before.kept);
    }
    this.#before = null;
    this.error.value = this.stream?.error ?? null;
    this.isLive.value = false;
    this.isStopping.value = false;
  }

  /** Drop the answer; events that still come are ignored. */
  leave(): void {
    this.drawing?.cancel();
    for (const off of this.#off) off();
    cancelAnimationFrame(this.#frame);
  }

  #draw(): void {
    this.#frame = 0;
    const { stream } = this;
    if (!stream) return;
    this.responseId = stream.id;
    const isBlank = stream.pieces.length === 0;
    this.#after = isBlank ? -1 : stream.sequence; // nothing came: what is shown is older
    this.seed = stream.response?.seed ?? this.seed;
    if (!isBlank) {
      const before = this.pieces.value;
      this.pieces.value = stream.pieces.map((piece, i) => (isSame(piece, before[i]) ? before[i]! : { ...piece }));
      this.text.value = stream.text;
    }
    this.status.value = stream.status;
    this.progress.value = stream.progress;
    const { inputTokens } = this.figures.value;
    const known = this.#isResumed ? this.figures.value : NOTHING;
    this.figures.value = { ...figuresOf(stream, known), ...inputOf(stream, inputTokens) };
  }
}

const isSame = (one: Piece, other: Piece | undefined): boolean => one.text.length === other?.text.length && one.isDone === other.isDone && one.kind === other.kind && one.ms === other.ms && one.text === other.text;

/** The prompt's length: at the end the server's count, until then the last known one. */
function inputOf(stream: ResponseStream, before: number | undefined): Pick<Figures, "inputTokens"> {
  const inputTokens = stream.response?.usage?.input_tokens ?? before;
  return inputTokens === undefined ? {} : { inputTokens };
}

/** After a reload the first token's time is the stored one, or the server's. */
function figuresOf(stream: ResponseStream, kept: Figures): Figures {
  const { sent, first, last } = stream.times;
  const wasResumed = kept !== NOTHING;
  if (first === null || last === null) return { ...kept, tokens: stream.tokens || kept.tokens };
  const perToken = stream.timing?.per_token_s;
  const seconds = (last - first) / 1000;
  const seen = stream.tokens > 1 && seconds > 0 && !wasResumed ? (stream.tokens - 1) / seconds : kept.tokensPerS;
  const serverFirst = stream.timing?.first_token_s;
  const firstMs = wasResumed ? (kept.firstMs ?? (serverFirst ? serverFirst * 1000 : null)) : first - sent;
  return {
    tokens: stream.tokens,
    tokensPerS: perToken ? 1 / perToken : seen,
    firstMs,
    cachedTokens: stream.usage?.cached_tokens ?? kept.cachedTokens,
    acceptedTokens: stream.usage?.accepted_tokens ?? kept.acceptedTokens ?? 0,
    proposedTokens: stream.usage?.proposed_tokens ?? kept.proposedTokens ?? 0,
    reasoningTokens: stream.response?.usage?.output_tokens_details.reasoning_tokens ?? kept.reasoningTokens ?? 0,
  };
}
