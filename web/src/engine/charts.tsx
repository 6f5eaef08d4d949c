/** Four small charts of the last minute, with the current figures above them. */

import { useComputed } from "@preact/signals";
import { ceiling, recentHitRate, type Sample } from "./snapshots/rates.ts";
import { samples, shown } from "./snapshots/store.ts";

const SPAN_MS = 60_000;
const [WIDE, HIGH] = [300, 80];

interface Line {
  name: string;
  of: (sample: Sample, index: number) => number | null;
}

interface ChartProps {
  title: string;
  lines: Line[];
  format: (value: number) => string;
  /** The scale's end, where known. */
  top?: number;
}

const round = (value: number): string => Math.round(value).toLocaleString();
const percent = (value: number): string => `${Math.round(value * 100)}%`;
const ms = (value: number): string => `${value < 10 ? value.toFixed(1) : Math.round(value)} ms`;

export function Charts() {
  return (
    <section class="charts" aria-label="The last minute">
      <Chart title="Tokens per second" format={round} lines={[{ name: "generated", of: (sample) => sample.tokensPerS }]} />
      <Chart
        title="Requests"
        format={round}
        lines={[
          { name: "running", of: (sample) => sample.running },
          { name: "waiting", of: (sample) => sample.waiting },
        ]}
      />
      <Chart title="Step time" format={ms} lines={[{ name: "mean", of: (sample) => sample.stepMs }]} />
      <Chart title="Prefix cache hits" format={percent} top={1} lines={[{ name: "over 5 s", of: (_, i) => recentHitRate(samples, i) }]} />
    </section>
  );
}

/** Samples of the last minute up to the shown snapshot, with their indices in `samples`. */
function window(end: number): [Sample, number][] {
  return samples.map((sample, i): [Sample, number] => [sample, i]).filter(([sample]) => sample.at <= end && sample.at > end - SPAN_MS);
}

function Chart({ title, lines, format, top }: ChartProps) {
  const drawn = useComputed(() => {
    const end = shown.value?.at ?? 0;
    const part = window(end);
    const values = lines.map((line) => part.map(([sample, i]) => ({ at: sample.at, value: line.of(sample, i) })));
    const highest = Math.max(0, ...values.flat().map(({ value }) => value ?? 0));
    const scale = top ?? ceiling(highest);
    return { scale, last: values.map((line) => line.at(-1)?.value ?? null), paths: values.map((line) => pathOf(line, end, scale)) };
  });
  const { scale, last, paths } = drawn.value;
  return (
    <figure class="card chart">
      <figcaption>
        <h2>{title}</h2>
        {lines.map((line, i) => (
          <span key={line.name} class="chart-now" data-line={i}>
            <b>{last[i] == null ? "–" : format(last[i])}</b> {line.name}
          </span>
        ))}
      </figcaption>
      <div class="chart-area" aria-hidden="true">
        <span class="chart-top">{format(scale)}</span>
        <svg viewBox={`0 0 ${WIDE} ${HIGH}`} preserveAspectRatio="none">
          <path class="chart-rule" d={`M0 0H${WIDE}M0 ${HIGH / 2}H${WIDE}M0 ${HIGH}H${WIDE}`} />
          {paths.map((path, i) => (
            <path key={i} class="chart-line" data-line={i} d={path} />
          ))}
        </svg>
        <span class="chart-since">60 s ago</span>
        <span class="chart-until">now</span>
      </div>
    </figure>
  );
}

/** A line with gaps where nothing was measured. */
function pathOf(line: { at: number; value: number | null }[], end: number, scale: number): string {
  let path = "";
  let isDown = false;
  for (const { at, value } of line) {
    if (value !== null) {
      const x = WIDE * (1 - (end - at) / SPAN_MS);
      path += `${isDown ? "L" : "M"}${x.toFixed(1)} ${(HIGH * (1 - Math.min(1, value / scale))).toFixed(1)}`;
    }
    isDown = value !== null;
  }
  return path;
}
