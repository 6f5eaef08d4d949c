/** How long the answers of the small load are. Pure. */

/** Tokens, at most: of the system prompt, of a reader's answer, of a long one. */
export interface Sizes {
  system: number;
  answer: number;
  long: number;
}

/** Together about twice a small pool, so that somebody has to give way; of a large one a corner. */
export function sizesFor(poolTokens: number, contextLength: number): Sizes {
  const unit = Math.min(poolTokens, contextLength);
  const within = (part: number, least: number, most: number) => Math.round(Math.max(least, Math.min(most, unit * part)));
  return { system: within(0.2, 16, 500), answer: within(0.16, 8, 220), long: within(0.45, 16, 700) };
}
