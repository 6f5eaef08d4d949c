/**
 * Tokens: an answer token by token, with each one's probability and alternatives.
 *
 * An ordinary answer is sent without them. To show them the answer is generated again with its
 * seed, which gives the same tokens; where it does not, the page says so.
 */

import type { ChatLogprob, DeltaEvent } from "../../client/index.ts";

export interface Alternative {
  text: string;
  /** 0 to 1. */
  probability: number;
  /** False for a part of a character, which has no text. */
  isText: boolean;
}

export interface Token extends Alternative {
  /** Its index in the response `from`: fork({at}) there drops it and all that follows. */
  at: number;
  from: string;
  alternatives: Alternative[];
  /** The token ended the answer and is not part of its text. */
  isEnd: boolean;
}

export const NUM_ALTERNATIVES = 5;

/** Tokens of one response from its deltas. `prefix`: text kept before its first token. */
export class TokenReader {
  readonly tokens: Token[] = [];
  prefix = "";
  #text = "";

  add(event: DeltaEvent, from: string): void {
    if (event.logprobs.length === 0 && this.tokens.length === 0) this.prefix += event.delta;
    else this.#text += event.delta;
    for (const entry of event.logprobs) this.tokens.push(tokenOf(entry, this.tokens.length, from));
  }

  /**
   * The tokens of a whole answer. Those of reasoning before its text have no event of their own:
   * `numTokens`, the answer's, says how many they are, less an end token without one.
   */
  finished(numTokens = this.tokens.length, hasEnded = false): Token[] {
    const last = this.tokens.at(-1);
    const before = this.tokens.slice(0, -1).map((token) => token.text);
    if (last && this.#text && before.join("").endsWith(this.#text)) last.isEnd = true;
    const numHidden = Math.max(0, numTokens - this.tokens.length - (hasEnded && !last?.isEnd ? 1 : 0));
    for (const token of this.tokens) token.at += numHidden;
    return this.tokens;
  }
}

function tokenOf(entry: ChatLogprob, at: number, from: string): Token {
  const own = alternativeOf(entry);
  return { ...own, at, from, alternatives: entry.top_logprobs.map(alternativeOf).filter((other) => other.text !== own.text), isEnd: false };
}

function alternativeOf({ token, bytes, logprob }: { token: string; bytes: number[]; logprob: number }): Alternative {
  const written = new TextEncoder().encode(token);
  const isText = written.length === bytes.length && written.every((byte, i) => byte === bytes[i]);
  return { text: token, probability: Math.exp(logprob), isText };
}

/** As 37%, 4.2% or under 0.1%. */
export function percent(probability: number): string {
  const value = probability * 100;
  if (value > 0 && value < 0.1) return "under 0.1%";
  return `${value >= 10 || value === 0 ? Math.round(value) : value.toFixed(1)}%`;
}

/** 0 (hardly expected) to 4 (nearly certain). */
export function band(probability: number): number {
  return [0.1, 0.3, 0.6, 0.9].filter((limit) => probability >= limit).length;
}

/** A token as it can be read: spaces and line ends made visible. */
export function visible(text: string): string {
  return text.replace(/\n/g, "⏎").replace(/\t/g, "⇥").replace(/^ | $/g, "␣") || "(empty)";
}
