/** Lengths of the small load's prompts and answers. Pure. */

/** Maximum tokens: of the system prompt, of a reader's answer, of a long one. */
export interface Sizes {
  system: number;
  answer: number;
  long: number;
}

/**
 * Together about twice a small pool, so that requests are preempted; a small part of a large one.
 */
export function sizesFor(poolTokens: number, contextLength: number): Sizes {
  const unit = Math.min(poolTokens, contextLength);
  const within = (part: number, min: number, max: number) => Math.round(Math.max(min, Math.min(max, unit * part)));
  return { system: within(0.2, 16, 500), answer: within(0.16, 8, 220), long: within(0.45, 16, 700) };
}
