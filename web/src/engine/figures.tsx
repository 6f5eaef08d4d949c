/** The figures of the shown snapshot. */

import { hitRate } from "./snapshots/rates.ts";
import { samples, shown } from "./snapshots/store.ts";

const whole = (value: number): string => Math.round(value).toLocaleString();

export function Figures() {
  const frame = shown.value;
  const stats = frame?.body.scheduler.stats;
  const rate = samples.findLast((sample) => sample.at <= (frame?.at ?? 0))?.tokensPerS ?? 0;
  const hits = stats ? hitRate(stats) : null;
  const used = stats ? stats.blocks_total - stats.blocks_free : 0;
  const facts: [string, string, string][] = stats
    ? [
        ["Running", whole(stats.running), "requests in the batch"],
        ["Waiting", whole(stats.waiting), `${whole(stats.paused)} paused`],
        ["Tokens per second", whole(rate), `${whole(stats.generated_tokens)} in total`],
        ["Blocks in use", whole(used), `${whole(stats.blocks_free)} free (${whole(stats.blocks_cached)} cached)`],
        ["Prefix hits", hits === null ? "–" : `${Math.round(hits * 100)}%`, "of prompt tokens"],
        ["Preemptions", whole(stats.preemptions_swap + stats.preemptions_recompute), `${whole(stats.preemptions_swap)} by swap`],
        ["Swapped out", whole(stats.swapped_out_blocks), `blocks, ${whole(stats.swapped_in_blocks)} swapped back in`],
        ["Proposed tokens", whole(stats.proposed_tokens), `${whole(stats.accepted_tokens)} of them accepted`],
        ["Copied on write", whole(stats.copied_blocks), "blocks"],
      ]
    : [];
  return (
    <dl class="facts">
      {facts.map(([name, value, note]) => (
        <div key={name}>
          <dt>{name}</dt>
          <dd>
            {value} <small>{note}</small>
          </dd>
        </div>
      ))}
    </dl>
  );
}
