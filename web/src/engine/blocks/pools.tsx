/** The two block pools: how many blocks are in which state, and where. */

import { signal, useComputed } from "@preact/signals";
import { useEffect } from "preact/hooks";
import { countStates, poolOf, type BlockState, type Frame, type PoolName } from "../snapshots/frames.ts";
import { Grid } from "./grid.tsx";
import { shown } from "../snapshots/store.ts";

const ANNOUNCE_EVERY_MS = 10_000;

type Entry = [key: string, text: string, states: BlockState[]];

const LEGENDS: Record<PoolName, Entry[]> = {
  device: [
    ["free", "free", ["free"]],
    ["cached", "cached", ["cached"]],
    ["leaving", "freed soon", ["leaving"]],
    ["private", "private", ["private"]],
    ["shared", "shared", ["shared"]],
  ],
  host: [
    ["free", "free", ["free"]],
    ["cached", "cached copies", ["cached"]],
    ["leaving", "freed soon", ["leaving"]],
    ["swapped", "swapped out", ["private", "shared"]],
  ],
};

function countsOf(frame: Frame | null, pool: PoolName): [string, string, number][] {
  const counts = frame ? countStates(frame.cells[pool]) : null;
  return LEGENDS[pool].map(([key, text, states]) => [key, text, states.reduce((sum, state) => sum + (counts?.[state] ?? 0), 0)]);
}

function Legend({ pool }: { pool: PoolName }) {
  const counts = useComputed(() => countsOf(shown.value, pool));
  return (
    <ul class="legend" aria-label={pool === "device" ? "Blocks by state" : "Host blocks by state"}>
      {counts.value.map(([key, text, count]) => (
        <li key={key} data-state={key}>
          <i class="swatch" data-swatch={key} /> {text} <b>{count.toLocaleString()}</b>
        </li>
      ))}
    </ul>
  );
}

function headOf(frame: Frame | null, pool: PoolName): string {
  if (!frame) return "";
  const { num_blocks: blocks, blocks_per_cell: each } = poolOf(frame, pool);
  const size = frame.body.scheduler.block_size;
  return `${blocks.toLocaleString()} blocks of ${size} tokens${each > 1 ? `, ${each} in a cell` : ""}`;
}

function Pool({ pool, title }: { pool: PoolName; title: string }) {
  const head = useComputed(() => headOf(shown.value, pool));
  const id = `${pool}-title`;
  return (
    <section class="card pool" aria-labelledby={id} data-pool={pool}>
      <div class="card-head">
        <h2 id={id}>{title}</h2>
        <span class="note">{head}</span>
      </div>
      <Legend pool={pool} />
      <Grid pool={pool} label={title} />
    </section>
  );
}

const summary = signal("");

function announce(): void {
  const frame = shown.peek();
  if (!frame) return;
  const counts = countsOf(frame, "device").map(([, text, count]) => `${count.toLocaleString()} ${text}`);
  const { running, waiting } = frame.body.scheduler.stats;
  summary.value = `${running} running, ${waiting} waiting. Blocks: ${counts.join(", ")}.`;
}

/** The pools in words for screen readers: at intervals, and only after a change. */
function Summary() {
  const isThere = useComputed(() => shown.value !== null).value;
  useEffect(() => {
    announce();
    const timer = setInterval(announce, ANNOUNCE_EVERY_MS);
    return () => clearInterval(timer);
  }, [isThere]);
  return (
    <div class="sr" role="status" id="engine-summary">
      {summary}
    </div>
  );
}

export function Pools() {
  const hasHost = useComputed(() => (shown.value?.cells.host.length ?? 0) > 0);
  return (
    <>
      <Pool pool="device" title="Block pool" />
      {hasHost.value && <Pool pool="host" title="Host pool" />}
      <Summary />
    </>
  );
}
