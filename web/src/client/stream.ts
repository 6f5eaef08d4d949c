/**
 * ResponseStream: one answer as it comes, whichever connection brings it.
 *
 * The stream takes events in order and by number, so that a replay adds nothing twice. It has no
 * socket: its requests go through the Port that client.ts passes in.
 */

import { Emitter } from "./emitter.ts";
import { ClientError } from "./errors.ts";
import { Pieces, type Piece, type PieceDelta } from "./pieces.ts";
import type { OwnUsage, DeltaEvent, ItemEvent, NumberedEvent, Response, ResponseCreate, StateEvent, Timing } from "./wire/responses.ts";

/** The stream's state. The last five are ends. */
export type StreamStatus =
  | "sending"
  | "waiting"
  | "prefill"
  | "running"
  | "preempted"
  | "paused"
  | "completed"
  | "incomplete"
  | "cancelled"
  | "failed"
  | "gone";

const ENDS: ReadonlySet<StreamStatus> = new Set(["completed", "incomplete", "cancelled", "failed", "gone"]);
const OPENING_EVENTS = 4; // at least, before the first token's; a kept prefix not counted
const RESPONSE_EVENTS = 2; // of those, the ones that belong to no piece

/** Of a status: requests before it in the queue, prefilled tokens of all, how it was preempted. */
export interface Progress {
  position?: number;
  done?: number;
  total?: number;
  how?: string;
}

export interface StreamEvents {
  /** The id came: from here on the stream can be resumed. Repeated after a lost create. */
  created: string;
  /** More text. The stream's fields are already up to date. */
  delta: DeltaEvent;
  /** Reasoning or a call began, grew or ended. */
  piece: Piece[];
  /** `status` or `progress` changed. */
  status: StreamStatus;
  /** The stream ended. */
  end: ResponseStream;
}

export interface Port {
  cancel(stream: ResponseStream): void;
  steer(stream: ResponseStream, input: string): Promise<ResponseStream>;
  ack(stream: ResponseStream, sequence: number): void;
  now(): number;
}

export interface Known {
  id: string;
  /** The last number seen; -1 or absent: none, so everything comes again. */
  after?: number;
  /** The text up to that number, and what it is part of where there is more than text. */
  text?: string;
  pieces?: readonly Piece[];
}

export class ResponseStream extends Emitter<StreamEvents> {
  readonly lane: string;
  readonly body: ResponseCreate;
  /** null until the server has assigned it. */
  id: string | null = null;
  text = "";
  /** Output tokens so far: by number while it streams, about; the server's count at the end. */
  tokens = 0;
  /** The last event's number: the cursor to resume at. */
  sequence = -1;
  status: StreamStatus = "sending";
  progress: Progress = {};
  /** The last response object that came: final once the stream has ended (not if gone). */
  response: Response | null = null;
  usage: OwnUsage | null = null;
  timing: Timing | null = null;
  error: ClientError | null = null;
  /** Milliseconds of the client's clock: sent, first text, last text. */
  readonly times: { sent: number; first: number | null; last: number | null };
  /** Settles at the end, whatever the end is; never rejects. */
  readonly done: Promise<ResponseStream>;
  isCancelled = false;
  /** Created elsewhere and known by its id only, so it can't be created again. */
  readonly isForeign: boolean;
  readonly #port: Port;
  readonly #pieces: Pieces;
  #numBeside: number; // events so far that are no deltas of its own
  #settle!: (stream: ResponseStream) => void;

  constructor(port: Port, lane: string, body: ResponseCreate, known?: Known) {
    super();
    this.#port = port;
    this.lane = lane;
    this.body = body;
    this.isForeign = known !== undefined;
    this.times = { sent: port.now(), first: null, last: null };
    this.done = new Promise((resolve) => (this.#settle = resolve));
    const hasPrefix = Boolean(body.fork && (body.fork.at > 0 || body.fork.text));
    this.#numBeside = hasPrefix ? 1 : 0;
    const isResumed = known?.after !== undefined && known.after >= 0;
    const text: Piece[] = known?.text ? [{ kind: "text", text: known.text, isDone: false }] : [];
    this.#pieces = new Pieces(isResumed ? (known.pieces ?? text) : []);
    if (known) {
      this.id = known.id;
      this.sequence = known.after ?? -1;
      this.text = known.text ?? "";
      if (isResumed) this.#numBeside = RESPONSE_EVENTS + this.#pieces.numEvents;
      this.tokens = this.#tokensAt(this.sequence);
    }
  }

  /** Reasoning, text and calls in order; `text` is all that is text. */
  get pieces(): readonly Piece[] {
    return this.#pieces.list;
  }

  get isEnded(): boolean {
    return ENDS.has(this.status);
  }

  /**
   * End it; `end` follows with status "cancelled". May be called before it has an id, and again.
   */
  cancel(): void {
    if (this.isEnded || this.isCancelled) return;
    this.isCancelled = true;
    this.#port.cancel(this);
  }

  /** Give it more input: it ends at the next token, and the returned stream continues. */
  steer(input: string): Promise<ResponseStream> {
    return this.#port.steer(this, input);
  }

  /** Acknowledge everything up to this number; only where acks are "manual". */
  ack(sequence: number = this.sequence): void {
    this.#port.ack(this, sequence);
  }

  /** The deltas' texts, from where it is now to the end; throws if it failed. */
  async *[Symbol.asyncIterator](): AsyncGenerator<string> {
    let given = 0;
    let wake = (): void => undefined;
    const off = [this.on("delta", () => wake()), this.on("end", () => wake())];
    try {
      for (;;) {
        const woken = new Promise<void>((resolve) => (wake = resolve));
        if (given < this.text.length) {
          const piece = this.text.slice(given);
          given = this.text.length;
          yield piece;
        } else if (this.isEnded) break;
        else await woken;
      }
    } finally {
      for (const stop of off) stop();
    }
    if (this.error) throw this.error;
  }

  // ---------------------------------------------------------------- the client's side

  setId(id: string): void {
    if (this.id === id) return;
    this.id = id;
    this.emit("created", id);
  }

  /** The response never began: it is created again. */
  forgetId(): void {
    this.id = null;
    this.setStatus("sending");
  }

  accept(event: NumberedEvent): void {
    if (this.isEnded || event.sequence_number <= this.sequence) return;
    this.sequence = event.sequence_number;
    switch (event.type) {
      case "response.output_text.delta":
      case "response.reasoning_text.delta":
      case "response.function_call_arguments.delta":
        return this.#add(event);
      case "response.output_item.added":
      case "response.output_item.done":
        this.#take(event);
        break;
      default:
        if ("response" in event) this.#answered(event);
    }
    this.#numBeside += 1;
  }

  acceptState(event: StateEvent): void {
    if (this.isEnded) return;
    const { position, done, total, how } = event;
    const progress: Progress = {};
    if (position !== undefined) progress.position = position;
    if (done !== undefined) progress.done = done;
    if (total !== undefined) progress.total = total;
    if (how !== undefined) progress.how = how;
    this.setStatus(event.type.slice("response.".length) as StreamStatus, progress);
  }

  setStatus(status: StreamStatus, progress: Progress = {}): void {
    if (this.isEnded) return;
    this.status = status;
    this.progress = progress;
    this.emit("status", status);
    if (this.isEnded) {
      this.emit("end", this);
      this.#settle(this);
    }
  }

  fail(error: ClientError, status: "failed" | "gone" = "failed"): void {
    this.error = error;
    this.setStatus(status);
  }

  #tokensAt(sequence: number): number {
    return Math.max(0, sequence + 1 - Math.max(this.#numBeside, OPENING_EVENTS));
  }

  #add(event: PieceDelta): void {
    const now = this.#port.now();
    this.times.first ??= now;
    this.times.last = now;
    this.#pieces.add(event, now);
    this.tokens = this.#tokensAt(event.sequence_number);
    if (this.status !== "running") this.setStatus("running");
    if (event.type === "response.output_text.delta") {
      this.text += event.delta;
      this.emit("delta", event);
    } else this.emit("piece", this.#pieces.list);
  }

  #take(event: ItemEvent): void {
    this.#pieces.take(event, this.#port.now());
    if (event.item.type !== "message") this.emit("piece", this.#pieces.list);
  }

  #answered(event: Extract<NumberedEvent, { response: Response }>): void {
    this.response = event.response;
    this.usage = event.usage ?? this.usage;
    this.timing = event.timing ?? this.timing;
    if (event.type === "response.created") this.setId(event.response.id);
    if (!["response.completed", "response.incomplete", "response.failed"].includes(event.type)) return;
    const { usage } = event.response;
    this.tokens = usage?.output_tokens ?? this.tokens;
    const reasonedMs = (usage?.output_tokens_details.reasoning_tokens ?? 0) * (this.timing?.per_token_s ?? 0) * 1000;
    if (reasonedMs > 0) this.#pieces.timed(reasonedMs);
    const error = event.response.error;
    if (error) this.error = new ClientError(error["message"] ?? "the response failed", 500, error["code"] ?? null);
    // A response that the server's stop cut off has reached no limit of its own.
    const isCutOff = event.response.incomplete_details?.["reason"] === "server_shutdown";
    this.setStatus(isCutOff ? "cancelled" : (event.response.status as StreamStatus));
  }
}
