/** The line below an answer: its state while it is not simply streaming, and its figures. */

import type { ClientError } from "../../client/index.ts";
import { refusedTokens, type Answer, type Figures } from "../conversation/answer.ts";

export function noteOf(answer: Answer): string {
  const { position, done, total, how } = answer.progress.value;
  if (answer.isLive.value && answer.isStopping.value) return "stopping";
  switch (answer.status.value) {
    case "sending":
      return "sending";
    case "waiting":
      return position ? `waiting, ${position} ahead in the queue` : "waiting";
    case "prefill":
      return `reading ${(done ?? 0).toLocaleString()} of ${(total ?? 0).toLocaleString()} prompt tokens`;
    case "preempted":
      return how ? `preempted (${how}), will resume` : "preempted, will resume";
    case "paused":
      return "paused";
    case "cancelled":
      return "stopped";
    case "incomplete":
      return "length limit reached";
    default:
      return "";
  }
}

export function figuresOf(figures: Figures, kept = 0): string[] {
  const { tokens, tokensPerS, firstMs, cachedTokens, acceptedTokens = 0, proposedTokens = 0, reasoningTokens = 0 } = figures;
  if (tokens === 0) return [];
  return [
    `${tokens.toLocaleString()} token${tokens === 1 ? "" : "s"}${kept > 0 ? ` after ${kept.toLocaleString()} kept` : ""}`,
    reasoningTokens ? `${reasoningTokens.toLocaleString()} of them reasoning` : "",
    tokensPerS ? `${tokensPerS < 10 ? tokensPerS.toFixed(1) : Math.round(tokensPerS).toLocaleString()} tokens/s` : "",
    firstMs === null ? "" : `first token after ${Math.max(1, Math.round(firstMs))} ms`,
    cachedTokens ? `${cachedTokens.toLocaleString()} from the prefix cache` : "",
    proposedTokens ? `${acceptedTokens.toLocaleString()} of ${proposedTokens.toLocaleString()} proposed tokens accepted` : "",
  ].filter(Boolean);
}

/** How long what was refused is, and may be; empty where the server did not count it. */
export function lengthOf(error: ClientError, room: number | undefined, hasSystem = false): string {
  const refused = refusedTokens(error);
  if (!refused || room === undefined) return "";
  const { count, isAtLeast } = refused;
  const beside = hasSystem ? " with the system prompt" : "";
  return `: it has ${isAtLeast ? "at least " : ""}${count.toLocaleString()} tokens${beside}, and with its answer it may have ${room.toLocaleString()}`;
}
