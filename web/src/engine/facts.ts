/** What the figures of a snapshot say. Pure. */

import type { StepStats } from "../client/index.ts";
import { hitRate } from "./snapshots/rates.ts";

const whole = (value: number): string => Math.round(value).toLocaleString();

/** Name, value and note of each. */
export function factsOf(stats: StepStats, rate: number): [string, string, string][] {
  const hits = hitRate(stats);
  const facts: [string, string, string][] = [
    ["Running", whole(stats.running), "requests in the batch"],
    ["Waiting", whole(stats.waiting), `${whole(stats.paused)} paused`],
    ["Tokens per second", whole(rate), `${whole(stats.generated_tokens)} in total`],
    ["Blocks in use", whole(stats.blocks_total - stats.blocks_free), `${whole(stats.blocks_free)} free (${whole(stats.blocks_cached)} cached)`],
    ["Prefix hits", hits === null ? "–" : `${Math.round(hits * 100)}%`, "of prompt tokens"],
    ["Preemptions", whole(stats.preemptions_swap + stats.preemptions_recompute), `${whole(stats.preemptions_swap)} by swap`],
    ["Swapped out", whole(stats.swapped_out_blocks), `blocks, ${whole(stats.swapped_in_blocks)} swapped back in`],
    ["Proposed tokens", whole(stats.proposed_tokens), `${whole(stats.accepted_tokens)} of them accepted`],
    ["Copied on write", whole(stats.copied_blocks), "blocks"],
  ];
  if (stats.rebuilds > 0) facts.push(["Failed steps", whole(stats.rebuilds), "all was computed again"]);
  return facts;
}
