/** Starts and stops the small load, and lists what to watch while it runs, by the shown snapshot. */

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
function sights(stats: StepStats, shared: boolean): [string, string, boolean][] {
  const givenWay = stats.preemptions_swap + stats.preemptions_recompute;
  return [
    ["Batching", `${stats.running === 1 ? "1 request is" : `${stats.running} requests are`} in the step; more than one grow side by side in the timeline.`, stats.running > 1],
    ["Sharing", "Five readers have one system prompt. Its blocks are there once, with a dot, in all five page tables; so is what a fork has in common with its parent.", shared],
    [
      "Preemption",
      givenWay > 0
        ? `The pool ran dry ${givenWay.toLocaleString()} times: somebody gave way, and went on later without losing a token.`
        : "The pool is large enough for all of them, so nobody has to give way. Start the server with --num-gpu-blocks-override 64 to see it.",
      givenWay > 0,
    ],
    [
      "Swap",
      stats.swapped_out_blocks > 0
        ? `${stats.swapped_out_blocks.toLocaleString()} blocks went to the host pool, ${stats.swapped_in_blocks.toLocaleString()} came back: in the timeline the lane turns thin meanwhile.`
        : "Who gives way is copied to the host pool where that is cheaper than computing it again. It has not happened yet.",
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
      <h2 id="load-title">What to look at</h2>
      <dl>
        {sights(frame.body.scheduler.stats, hasShared).map(([name, text, isThere]) => (
          <div key={name} data-there={isThere}>
            <dt>{name}</dt>
            <dd>{text}</dd>
          </div>
        ))}
      </dl>
      <p class="note">
        {answers} answers so far. It begins nothing new after {LASTS_MS / 1000} seconds, and stops when you leave. Slow motion shows the single steps.
      </p>
    </section>
  );
}
