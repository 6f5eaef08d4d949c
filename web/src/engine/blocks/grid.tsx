/**
 * A block pool as a grid: a cell a block, its state by colour and, where there is room, by shape.
 */

import { useComputed, useSignal } from "@preact/signals";
import { useId, useRef } from "preact/hooks";
import { useSheet, useWidth, type Sheet } from "../canvas.ts";
import { coloursOf, drawCell } from "./cells.ts";
import { describe, poolOf, stateOf, type Frame, type PoolName } from "../snapshots/frames.ts";
import { cellAt, fit, moved, placeOf, type Layout } from "./layout.ts";
import { chosen, shown, spot } from "../snapshots/store.ts";

const NARROW = 560;
// pixels of height to fit into, if cells can be small enough
const ROOM = { device: 300, host: 110 };

/** Cells of the request under the pointer; null: no request, so none is dimmed. */
function litCells(frame: Frame, pool: PoolName): Set<number> | null {
  const request = chosen.value;
  if (request === null) return null;
  const each = poolOf(frame, pool).blocks_per_cell;
  const tables = frame.tables.filter((table) => table.request === request);
  return new Set(tables.flatMap((table) => [...(pool === "device" ? table.blocks : table.hostBlocks)].map((block) => Math.floor(block / each))));
}

/** Draws the cells that changed since the last call. */
class Painter {
  #cells: Uint8Array | null = null;
  #lit: Set<number> | null = null;

  paint(sheet: Sheet, layout: Layout, cells: Uint8Array, pool: PoolName, lit: Set<number> | null): void {
    const { context, colours } = sheet;
    const isAll = sheet.isBlank || lit !== null || this.#lit !== null || this.#cells?.length !== cells.length;
    if (isAll) context.clearRect(0, 0, sheet.width, sheet.height);
    const before = isAll ? null : this.#cells;
    const size = layout.pitch - layout.gap;
    for (let cell = 0; cell < cells.length; cell += 1) {
      const value = cells[cell] ?? 0;
      if (before && before[cell] === value) continue;
      const state = stateOf(value);
      const [fill, mark] = coloursOf(state, pool, colours);
      const { x, y } = placeOf(layout, cell);
      if (lit) context.globalAlpha = lit.has(cell) ? 1 : 0.25;
      drawCell(context, x, y, size, fill, mark, state);
    }
    context.globalAlpha = 1;
    this.#cells = cells;
    this.#lit = lit;
  }
}

export function Grid({ pool, label }: { pool: PoolName; label: string }) {
  const box = useRef<HTMLDivElement>(null);
  const painter = useRef<Painter>(null);
  painter.current ??= new Painter();
  const width = useWidth(box);
  const count = useComputed(() => shown.value?.cells[pool].length ?? 0);
  const layout = useComputed(() => fit(count.value, Math.max(1, width.value), ROOM[pool] * (width.value < NARROW ? 1.4 : 1)));
  const canvas = useSheet(
    width,
    () => layout.value.height,
    (sheet) => {
      const frame = shown.value;
      if (frame) painter.current?.paint(sheet, layout.value, frame.cells[pool], pool, litCells(frame, pool));
    },
  );
  return (
    <div class="grid-box">
      <div ref={box} class="grid-area">
        <canvas ref={canvas} aria-hidden="true" />
        <Marker pool={pool} layout={layout} />
        <Pointer pool={pool} layout={layout} label={label} />
      </div>
    </div>
  );
}

interface Part {
  pool: PoolName;
  layout: { value: Layout };
}

/** The frame around the cell under the pointer, here or in a page table. */
function Marker({ pool, layout }: Part) {
  const at = spot.value;
  const frame = shown.value;
  if (!frame || at?.pool !== pool) return null;
  const { pitch, gap, count } = layout.value;
  const cell = Math.floor(at.block / poolOf(frame, pool).blocks_per_cell);
  if (cell >= count) return null;
  const { x, y } = placeOf(layout.value, cell);
  const size = `${pitch - gap + 6}px`;
  return <div class="grid-marker" style={{ width: size, height: size, transform: `translate(${x - 3}px, ${y - 3}px)` }} />;
}

/** Takes pointer and keys and names the block: one Tab stop for all cells. */
function Pointer({ pool, layout, label }: Part & { label: string }) {
  const cell = useSignal(0);
  const id = useId();
  // set by keys only: changes under a resting pointer are not announced
  const announced = useSignal("");
  const description = useComputed(() => {
    const [frame, at] = [shown.value, spot.value];
    if (!frame || at?.pool !== pool) return "Point at a block, or use the arrow keys, to see its contents.";
    return describe(frame, pool, Math.floor(at.block / poolOf(frame, pool).blocks_per_cell));
  });
  const point = (at: number) => {
    const frame = shown.value;
    if (!frame) return;
    cell.value = at;
    spot.value = { pool, block: at * poolOf(frame, pool).blocks_per_cell };
  };
  const onMove = (event: PointerEvent) => {
    const at = cellAt(layout.value, event.offsetX, event.offsetY);
    if (at === null) leave();
    else point(at);
  };
  const leave = () => {
    if (spot.value?.pool === pool) spot.value = null;
  };
  const onKey = (event: KeyboardEvent) => {
    const at = moved(layout.value, Math.min(cell.value, layout.value.count - 1), event.key);
    if (at === null) return;
    event.preventDefault();
    point(at);
    announced.value = description.value;
  };
  return (
    <>
      <div
        class="grid-pointer"
        style={{ height: `${layout.value.height}px` }}
        role="application"
        aria-roledescription="grid of blocks"
        aria-label={`${label}. Use the arrow keys to move between blocks.`}
        aria-describedby={id}
        tabIndex={0}
        onPointerMove={onMove}
        onPointerDown={onMove}
        onPointerLeave={leave}
        onFocus={() => point(Math.min(cell.value, layout.value.count - 1))}
        onBlur={leave}
        onKeyDown={onKey}
      />
      <p id={id} class="description">
        {description}
      </p>
      <div class="sr" role="status">
        {announced}
      </div>
    </>
  );
}
