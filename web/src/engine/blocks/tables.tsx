/**
 * Page tables: a row for each choice of a live request, its blocks in order, coloured as the grid.
 */

import { useComputed, useSignal } from "@preact/signals";
import { useRef } from "preact/hooks";
import { useSheet, useWidth, type Sheet } from "../canvas.ts";
import { coloursOf, drawCell } from "./cells.ts";
import { describe, poolOf, stateOf, type Frame, type PoolName, type Table } from "../snapshots/frames.ts";
import { cellAt, placeOf, type Layout } from "./layout.ts";
import { chosen, shown, spot } from "../snapshots/store.ts";

const MAX_ROWS = 24;
const PITCH = 11;
const GAP = 2;
const MAX_LINES = 4;

export const STATUS_TEXT: Record<string, string> = {
  swapping_out: "swapping out",
  swapping_in: "swapping in",
  preempted: "preempted, will be recomputed",
};

interface Entry {
  pool: PoolName;
  block: number;
}

/** The blocks of a table with their pools, in order, up to the number drawn. */
function entriesOf(table: Table, room: number): Entry[] {
  const on = (pool: PoolName) => (block: number) => ({ pool, block });
  return [...[...table.blocks].map(on("device")), ...[...table.hostBlocks].map(on("host"))].slice(0, room);
}

function layoutOf(width: number, count: number): Layout {
  const columns = Math.max(1, Math.floor(width / PITCH));
  const shown = Math.min(count, columns * MAX_LINES);
  const rows = Math.max(1, Math.ceil(shown / columns));
  return { count: shown, columns, rows, pitch: PITCH, gap: GAP, height: rows * PITCH + 2 };
}

export function Tables() {
  const frame = shown.value;
  const tables = frame?.tables ?? [];
  const isEmpty = tables.length === 0;
  const others = Object.values(frame?.body.scheduler.unlisted ?? {}).reduce((sum, count) => sum + count, 0);
  const more = tables.length - MAX_ROWS;
  return (
    <section class="card" aria-labelledby="tables-title">
      <h2 id="tables-title">Page tables</h2>
      <p class="note">
        {isEmpty ? "No request is running. Each running request has a row here, with the blocks that store its tokens." : "Each request's blocks, in the order of its tokens. A dot marks a block that several requests share."}
      </p>
      {!isEmpty && (
        <ul class="tables">
          {tables.slice(0, MAX_ROWS).map((table) => (
            <Row key={table.name} name={table.name} />
          ))}
        </ul>
      )}
      {more > 0 && <p class="note">and {more.toLocaleString()} more</p>}
      {others > 0 && <p class="note">and {others.toLocaleString()} that are not listed or belong to other API keys</p>}
    </section>
  );
}

function Row({ name }: { name: string }) {
  const box = useRef<HTMLDivElement>(null);
  const width = useWidth(box);
  const hovered = useSignal<number | null>(null);
  const table = useComputed(() => shown.value?.tables.find((other) => other.name === name) ?? null);
  const layout = useComputed(() => layoutOf(Math.max(1, width.value), (table.value?.numBlocks ?? 0) + (table.value?.numHostBlocks ?? 0)));
  const canvas = useSheet(
    width,
    () => layout.value.height,
    (sheet) => {
      const frame = shown.value;
      if (frame && table.value) paint(sheet, layout.value, frame, entriesOf(table.value, layout.value.count));
    },
  );
  const onMove = (event: PointerEvent) => {
    const at = cellAt(layout.value, event.offsetX, event.offsetY);
    hovered.value = at;
    const entry = at === null || !table.value ? undefined : entriesOf(table.value, layout.value.count)[at];
    spot.value = entry ?? null;
  };
  const leave = () => {
    hovered.value = null;
    spot.value = null;
  };
  const now = table.value;
  if (!now) return null;
  const all = now.numBlocks + now.numHostBlocks;
  return (
    <li class="table-row" data-shares={isSharing(now)} data-status={now.status} onPointerEnter={() => (chosen.value = now.request)} onPointerLeave={() => (chosen.value = null)}>
      <span class="table-name">{now.name}</span>
      <span class="table-status">{STATUS_TEXT[now.status] ?? now.status}</span>
      <span class="table-tokens">
        {now.tokens.toLocaleString()} tokens, {all.toLocaleString()} {all === 1 ? "block" : "blocks"}
      </span>
      <div ref={box} class="table-cells" onPointerMove={onMove} onPointerLeave={leave}>
        <canvas ref={canvas} aria-hidden="true" />
        {all > layout.value.count && <span class="note">and {(all - layout.value.count).toLocaleString()} more</span>}
        <Tip frame={shown.value} isHere={hovered.value !== null} />
      </div>
    </li>
  );
}

/** Whether the block under the pointer is in this table too. */
function isSharing(table: Table): boolean {
  const at = spot.value;
  return at !== null && (at.pool === "device" ? table.blocks : table.hostBlocks).includes(at.block);
}

function Tip({ frame, isHere }: { frame: Frame | null; isHere: boolean }) {
  const at = spot.value;
  if (!isHere || !frame || !at) return null;
  return <div class="tip">{describe(frame, at.pool, Math.floor(at.block / poolOf(frame, at.pool).blocks_per_cell))}</div>;
}

function paint({ context, width, height, colours }: Sheet, layout: Layout, frame: Frame, entries: Entry[]): void {
  context.clearRect(0, 0, width, height);
  const at = spot.value;
  entries.forEach(({ pool, block }, i) => {
    const { x, y } = placeOf(layout, i);
    const cell = frame.cells[pool][Math.floor(block / poolOf(frame, pool).blocks_per_cell)] ?? 0;
    const state = stateOf(cell);
    const [fill, mark] = coloursOf(state, pool, colours);
    drawCell(context, x + 1, y + 1, PITCH - GAP, fill, mark, state);
    if (at?.pool !== pool || at.block !== block) return;
    context.strokeStyle = colours.ink;
    context.lineWidth = 2;
    context.strokeRect(x + 1, y + 1, PITCH - GAP, PITCH - GAP);
  });
}
