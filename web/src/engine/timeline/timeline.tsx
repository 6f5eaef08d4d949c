/** The batch by step: lanes of requests, what each did in every step, scrolling as steps come. */

import { useComputed, useSignal } from "@preact/signals";
import { useRef } from "preact/hooks";
import { useSheet, useWidth, type Sheet } from "../canvas.ts";
import type { Palette } from "../palette.ts";
import { chosen, column, shown, timeline } from "../snapshots/store.ts";
import { KINDS, seenFrom, type Kind, type Run } from "./model.ts";

const LANE = 16;
const STRIP = 30; // tokens of each step, above the lanes
const MIN_LANES = 6;
const MAX_LANES = 24;
const SPANS = [64, 256, 1024, 4096];
const SEPARATED_FROM = 5; // pixels of a step

export const KIND_TEXT: Record<Kind, string> = {
  prefill: "prefill",
  decode: "decode",
  verify: "decode with proposed tokens",
  waiting: "waiting",
  paused: "paused for its reader",
  swapped: "swapped to the host pool",
  dropped: "preempted, to be recomputed",
};

interface View {
  /** The first visible column, fractional, and pixels a column. */
  start: number;
  each: number;
  lanes: number;
}

const lanesNow = (): number => Math.max(MIN_LANES, Math.min(MAX_LANES, timeline.lanesBefore(column.value)));

export function TimelineView() {
  const box = useRef<HTMLDivElement>(null);
  const width = useWidth(box);
  const span = useSignal(1);
  const pointed = useSignal<{ x: number; y: number } | null>(null);
  const lanes = useComputed(() => (void shown.value, lanesNow()));
  const view = (): View => {
    const each = width.value / (SPANS[span.value] ?? 1);
    return { start: column.value - width.value / each, each, lanes: lanes.value };
  };
  const canvas = useSheet(
    width,
    () => STRIP + lanes.value * LANE,
    (sheet) => paint(sheet, view()),
  );
  const onMove = (event: PointerEvent) => {
    pointed.value = { x: event.offsetX, y: event.offsetY };
    chosen.value = runAt(view(), pointed.value)?.request ?? null;
  };
  const leave = () => (pointed.value = chosen.value = null);
  return (
    <section class="card" aria-labelledby="timeline-title">
      <div class="card-head">
        <h2 id="timeline-title">The batch, step by step</h2>
        <div class="segments" role="group" aria-label="Steps on the screen">
          {SPANS.map((steps, i) => (
            <button key={steps} type="button" aria-pressed={span.value === i} onClick={() => (span.value = i)}>
              {steps.toLocaleString()}
            </button>
          ))}
          <span>steps</span>
        </div>
      </div>
      <KindLegend />
      <div ref={box} class="timeline-area" onPointerMove={onMove} onPointerLeave={leave}>
        <canvas ref={canvas} aria-hidden="true" />
      </div>
      <Description view={view} at={pointed.value} />
    </section>
  );
}

function KindLegend() {
  return (
    <ul class="legend">
      {KINDS.map((kind) => (
        <li key={kind}>
          <i class="swatch" data-kind={kind} /> {KIND_TEXT[kind]}
        </li>
      ))}
    </ul>
  );
}

function runAt(view: View, { x, y }: { x: number; y: number }): Run | null {
  const at = Math.floor(view.start + x / view.each);
  const lane = timeline.lanes[Math.floor((y - STRIP) / LANE)];
  return lane?.runs.find((run) => run.from <= at && at < run.to) ?? null;
}

function Description({ view, at }: { view: () => View; at: { x: number; y: number } | null }) {
  const text = useComputed(() => {
    void shown.value;
    return timeline.end > 0 ? "Each column is a step of the engine; the bars above show how many tokens it computed." : "No steps yet.";
  });
  if (!at) return <p class="description">{text}</p>;
  const now = view();
  const step = timeline.column(Math.floor(now.start + at.x / now.each));
  const run = runAt(now, at);
  const parts = [step ? `Step ${step.number.toLocaleString()}: ${step.tokens.toLocaleString()} tokens` : "No step here"];
  if (run) {
    const { steps, tokens } = seenFrom(run, column.value);
    parts.push(`#${run.request} ${KIND_TEXT[run.kind]}, ${steps.toLocaleString()} steps${tokens ? `, ${tokens.toLocaleString()} tokens` : ""}`);
  }
  return <p class="description">{parts.join(" · ")}</p>;
}

// ---------------------------------------------------------------- drawing

const isComputing = (kind: Kind): boolean => kind === "prefill" || kind === "decode" || kind === "verify";

function paint(sheet: Sheet, view: View): void {
  const { context, width, height, colours } = sheet;
  context.clearRect(0, 0, width, height);
  paintStrip(sheet, view);
  context.fillStyle = colours.line;
  for (let lane = 0; lane <= view.lanes; lane += 1) context.fillRect(0, STRIP + lane * LANE - 0.5, width, 0.5);
  const end = view.start + width / view.each;
  timeline.lanes.slice(0, view.lanes).forEach(({ runs }, lane) => {
    for (const run of runs) {
      if (run.to <= view.start || run.from >= end) continue;
      paintRun(sheet, view, run, STRIP + lane * LANE, Math.min(end, run.to));
    }
  });
}

/** Tokens a step, on a square-root scale: a prompt has hundreds, a step of decodes a few. */
function paintStrip({ context, width, colours }: Sheet, view: View): void {
  const first = Math.max(0, Math.floor(view.start));
  const last = Math.floor(view.start + width / view.each);
  let top = 1;
  for (let at = first; at < last; at += 1) top = Math.max(top, timeline.column(at)?.tokens ?? 0);
  for (let at = first; at < last; at += 1) {
    const step = timeline.column(at);
    if (!step) continue;
    const x = (at - view.start) * view.each;
    const high = Math.sqrt(step.tokens / top) * (STRIP - 8);
    context.fillStyle = colours.soft;
    context.fillRect(x, STRIP - 3 - high, Math.max(0.5, view.each - (view.each >= SEPARATED_FROM ? 1 : 0)), high);
    if (!step.isAfterGap) continue;
    context.fillStyle = colours.line; // steps between were not recorded
    context.fillRect(x, STRIP, 1, view.lanes * LANE);
  }
}

function paintRun({ context, colours }: Sheet, view: View, run: Run, top: number, to: number): void {
  const x = Math.max(-2, (run.from - view.start) * view.each);
  const wide = (to - view.start) * view.each - x;
  const isDim = chosen.value !== null && chosen.value !== run.request;
  context.globalAlpha = isDim ? 0.25 : 1;
  drawBar(context, colours, run.kind, x, top + 2, Math.max(0.75, wide), LANE - 4);
  if (view.each >= SEPARATED_FROM && isComputing(run.kind)) {
    context.fillStyle = colours.panel;
    for (let at = Math.max(run.from, Math.ceil(view.start)) + 1; at <= to; at += 1) context.fillRect((at - view.start) * view.each - 1, top + 2, 1, LANE - 4);
  }
  context.globalAlpha = isDim ? 0.45 : 1;
  const label = `#${run.request}`;
  if (run.kind === "decode" && wide > label.length * 7 + 8) {
    context.font = "600 10px system-ui, sans-serif";
    const left = Math.max(0, x) + 2;
    context.fillStyle = colours.decode; // over the lines between the steps
    context.fillRect(left, top + 2, context.measureText(label).width + 6, LANE - 4);
    context.fillStyle = colours.panel;
    context.fillText(label, left + 3, top + LANE - 4.5);
  }
  context.globalAlpha = 1;
}

/**
 * Computing: full and high; not computing: thin, dashed or hollow, so that it shows without colour.
 */
function drawBar(context: CanvasRenderingContext2D, colours: Palette, kind: Kind, x: number, y: number, wide: number, high: number): void {
  context.fillStyle = context.strokeStyle = colours[kind];
  if (isComputing(kind)) {
    context.fillRect(x, y, wide, high);
    if (kind !== "verify") return;
    context.fillStyle = colours.panel; // a stripe: it shows without colour
    context.fillRect(x, y + high / 2 - 1, wide, 2);
    return;
  }
  const middle = y + high / 2;
  if (kind === "swapped") context.fillRect(x, middle - 2, wide, 4);
  else {
    context.lineWidth = 2;
    context.setLineDash(kind === "waiting" ? [1, 4] : kind === "paused" ? [6, 4] : [2, 2]);
    context.beginPath();
    context.moveTo(x, middle);
    context.lineTo(x + wide, middle);
    context.stroke();
    context.setLineDash([]);
  }
}
