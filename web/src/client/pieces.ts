/**
 * Pieces: what an answer consists of, in order: reasoning, text, calls of tools.
 *
 * One piece for each item of the response, as far as its events have come.
 */

import type { ArgumentsDelta, ItemEvent, DeltaEvent, ReasoningDelta } from "./wire/responses.ts";

export interface Piece {
  kind: "text" | "reasoning" | "call";
  /** Its text; a call's arguments, JSON once it is done. */
  text: string;
  isDone: boolean;
  /**
   * Milliseconds from its first event to its last so far; absent where it was not seen live. Of an
   * answer's only reasoning, at the end: how long the server took.
   */
  ms?: number;
  /** Of a call: the function, and the id that its result names. */
  name?: string;
  callId?: string;
}

export type PieceDelta = DeltaEvent | ReasoningDelta | ArgumentsDelta;

const KINDS = { message: "text", reasoning: "reasoning", function_call: "call" } as const;
const KIND_OF = {
  "response.output_text.delta": "text",
  "response.reasoning_text.delta": "reasoning",
  "response.function_call_arguments.delta": "call",
} as const;
/** Events beside the deltas, of a piece that is being written and of a whole one. */
const NUM_EVENTS = { text: [2, 5], reasoning: [2, 5], call: [1, 3] } as const;

export class Pieces {
  readonly list: Piece[];
  /** When each began, on the client's clock; absent: not seen. */
  readonly #begun = new Map<number, number>();

  constructor(list: readonly Piece[] = []) {
    this.list = list.map((piece) => ({ ...piece }));
  }

  /** Events beside the deltas that these pieces took. */
  get numEvents(): number {
    return this.list.reduce((sum, { kind, isDone }) => sum + NUM_EVENTS[kind][isDone ? 1 : 0], 0);
  }

  /** output_item.added or .done. */
  take({ type, item, output_index }: ItemEvent, now: number): void {
    const piece = this.#at(output_index, KINDS[item.type]);
    if (item.type === "function_call") Object.assign(piece, { name: item.name, callId: item.call_id });
    if (type === "response.output_item.added") this.#begun.set(output_index, now);
    else {
      this.#touch(output_index, now);
      piece.isDone = true;
      piece.text = item.type === "function_call" ? item.arguments : item.content.map(({ text }) => text).join("");
    }
  }

  add({ type, delta, output_index }: PieceDelta, now: number): void {
    this.#at(output_index, KIND_OF[type]).text += delta;
    this.#touch(output_index, now);
  }

  /** The server's time of the reasoning: here its events may have come late, or once more. */
  timed(ms: number): void {
    const [thought, ...others] = this.list.filter(({ kind }) => kind === "reasoning");
    if (thought && others.length === 0) thought.ms = ms; // how it divides among several is unknown
  }

  #at(index: number, kind: Piece["kind"]): Piece {
    while (this.list.length < index) this.list.push({ kind: "text", text: "", isDone: true });
    return (this.list[index] ??= { kind, text: "", isDone: false });
  }

  #touch(index: number, now: number): void {
    const begun = this.#begun.get(index);
    const piece = this.list[index];
    if (begun !== undefined && piece) piece.ms = now - begun;
  }
}
