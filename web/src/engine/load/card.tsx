/**
 * Starts and stops the small load, and lists what to watch while it runs, by the shown snapshot.
 */

import { useEffect } from "preact/hooks";
import { isConnected } from "../../app/connection.ts";
import type { StepStats } from "../../client/index.ts";
import { isLoading, loadFault, LASTS_MS, startLoad, stopLoad } from "./load.ts";
import { mode, playback, shown } from "../snapshots/store.ts";

export function LoadButton() {
  useEffect(() => stopLoad, []);
  const scheduler = shown.value?.body.scheduler;
  const start = () => scheduler && startLoad(scheduler.device.num_blocks * scheduler.block_size);
  return isLoading.value ? (
    <button class="button" type="button" onClick={stopLoad}>
      Stop the load
    </button>
  ) : (
    <button class="button primary" type="button" disabled={!isConnected.value || !scheduler} onClick={start}>
      Start a small load
    </button>
  );
}

/** Each effect: its name, its text, whether it can be seen now. */
function effects(stats: StepStats, shared: boolean): [string, string, boolean][] {
  const preemptions = stats.preemptions_swap + stats.preemptions_recompute;
  return [
    ["Batching", `${stats.running === 1 ? "1 request is" : `${stats.running} requests are`} in the current step; several advance side by side in the timeline.`, stats.running > 1],
    ["Sharing", "Five readers share one system prompt: its blocks are stored once and appear, with a dot, in all five page tables. A fork shares its parent's blocks in the same way.", shared],
    [
      "Preemption",
      preemptions > 0
        ? `The pool was full ${preemptions.toLocaleString()} times: a request was preempted, and resumed later without losing a token.`
        : "The pool is large enough for all requests, so none is preempted. Start the server with --num-gpu-blocks-override 64 to see it.",
      preemptions > 0,
    ],
    [
      "Swap",
      stats.swapped_out_blocks > 0
        ? `${stats.swapped_out_blocks.toLocaleString()} blocks were copied to the host pool, ${stats.swapped_in_blocks.toLocaleString()} back: meanwhile the request's lane in the timeline is thin.`
        : "A preempted request is copied to the host pool if that is cheaper than recomputing it. This has not happened yet.",
      stats.swapped_out_blocks > 0,
    ],
  ];
}

export function LoadCard() {
  void mode.value;
  const frame = shown.value;
  const isOver = playback.isLive && !isLoading.value; // no further snapshot will say so
  if (loadFault.value) {
    return (
      <p class="fault" role="alert">
        The load was refused: {loadFault}
      </p>
    );
  }
  if (!frame?.load || isOver) return null;
  const { answers, hasShared } = frame.load;
  return (
    <section class="card load" aria-labelledby="load-title">
      <h2 id="load-title">What to watch</h2>
      <dl>
        {effects(frame.body.scheduler.stats, hasShared).map(([name, text, isThere]) => (
          <div key={name} data-there={isThere}>
            <dt>{name}</dt>
            <dd>{text}</dd>
          </div>
        ))}
      </dl>
      <p class="note">
        {answers} answers so far. No new request starts after {LASTS_MS / 1000} seconds, and the load stops when you leave this view. Slow motion shows individual steps.
      </p>
    </section>
  );
}
