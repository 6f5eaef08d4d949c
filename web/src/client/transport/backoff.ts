/**
 * How long to wait before the next try: 0.5 s, doubling to 8 s, a quarter more or less by chance.
 */

export const FIRST_MS = 500;
export const MAX_MS = 8000;

/** `attempt` counts from 0; `random` gives [0, 1). */
export function backoffMs(attempt: number, random: () => number = Math.random): number {
  return Math.min(FIRST_MS * 2 ** attempt, MAX_MS) * (0.75 + random() / 2);
}

/** The close codes after which a client reconnects; never after 44xx. */
export const RECONNECT_CODES: ReadonlySet<number> = new Set([1001, 1005, 1006, 1011, 1012, 1013, 1015]);
