// A Service's traffic: figures now, and plots of the last minutes.
import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import uPlot from "uplot";
import "uplot/dist/uPlot.min.css";
import { duration, flow, type Point, rate, size, span, useFlow } from "./flow";
import type { Rates } from "./types";

interface Line {
  name: string;
  ink: "accent" | "bad" | "good" | "warn";
  of: (p: Point) => number | undefined;
}

interface Plot {
  title: string;
  lines: Line[];
  format: (n: number) => string;
  /** whole numbers have no ticks in between. */
  whole?: boolean;
}

const plots: Record<"new" | "open" | "bytes" | "latency", Plot> = {
  new: {
    title: "New connections a second",
    lines: [
      { name: "new", ink: "accent", of: (p) => p.new },
      { name: "reset", ink: "bad", of: (p) => p.resets },
    ],
    format: rate,
  },
  open: { title: "Open connections", lines: [{ name: "open", ink: "good", of: (p) => p.open }], whole: true, format: (n) => Math.round(n).toLocaleString("en") },
  bytes: { title: "Bytes a second", lines: [{ name: "both ways", ink: "accent", of: (p) => p.bytes }], format: size },
  latency: {
    title: "Time until the endpoint answers",
    lines: [
      { name: "half within", ink: "accent", of: (p) => p.p50 },
      { name: "99 % within", ink: "warn", of: (p) => p.p99 },
    ],
    format: duration,
  },
};

/** inkOf is a colour of the style sheet as a canvas takes it. */
function inkOf(name: string): string {
  const probe = document.createElement("i");
  probe.style.color = `var(--${name})`;
  document.body.append(probe);
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found;
}

/** useColours changes when the page's colours do. */
function useColours(): number {
  const [version, set] = useState(0);
  useEffect(() => {
    const change = () => set((n) => n + 1);
    const media = window.matchMedia("(prefers-color-scheme: dark)");
    const observer = new MutationObserver(change);
    media.addEventListener("change", change);
    observer.observe(document.documentElement, { attributes: true, attributeFilter: ["data-theme"] });
    return () => {
      media.removeEventListener("change", change);
      observer.disconnect();
    };
  }, []);
  return version;
}

const clock = (seconds: number) => new Date(seconds * 1000).toLocaleTimeString("en-GB");
const height = 140;

/** steps are those between ticks: others, such as 2.5, would be rounded in their labels. */
const steps = Array.from({ length: 19 }, (_, i) => [1, 2, 5].map((n) => Number(`${n}e${i - 6}`))).flat();

/** Gap is where nothing is known: a line that went on there would be made up. */
interface Gap {
  at: number;
  gap: true;
}

/** withGaps puts a gap where figures have not come for a while. */
function withGaps(points: Point[], every: number): (Point | Gap)[] {
  const out: (Point | Gap)[] = [];
  for (const p of points) {
    const last = out.at(-1);
    if (last && p.at - last.at > Math.max(10, 3 * every)) out.push({ at: (last.at + p.at) / 2, gap: true });
    out.push(p);
  }
  return out;
}

function Chart({ plot, points }: { plot: Plot; points: Point[] }) {
  const frame = useRef<HTMLDivElement>(null);
  const drawn = useRef<uPlot | undefined>(undefined);
  const [at, setAt] = useState<number | null>(null);
  const colours = useColours();
  const all = useMemo(() => withGaps(points, flow.last?.every ?? 0), [points.length, points.at(-1)?.at]);
  const data = useMemo<uPlot.AlignedData>(() => [all.map((p) => p.at), ...plot.lines.map((line) => all.map((p) => ("gap" in p ? null : (line.of(p) ?? null))))], [all]);
  const latest = useRef(data);
  latest.current = data;
  useEffect(() => {
    const box = frame.current!;
    const axis = { stroke: inkOf("dim"), grid: { stroke: inkOf("line"), width: 1 }, ticks: { show: false }, font: "11px system-ui, sans-serif" };
    const chart = new uPlot(
      {
        width: Math.max(200, box.clientWidth),
        height,
        padding: [8, 8, 0, 0],
        legend: { show: false },
        cursor: { y: false, drag: { setScale: false }, points: { size: 6 }, sync: { key: "traffic" } },
        scales: {
          x: { range: () => [Date.now() / 1000 - span, Date.now() / 1000] },
          y: { range: (_, __, most) => [0, most > 0 ? most * 1.15 : 1] },
        },
        axes: [
          { ...axis, space: 70, size: 26, values: (_, ticks) => ticks.map((t) => clock(t).slice(0, 5)) },
          { ...axis, size: 58, space: 30, incrs: plot.whole ? steps.filter((n) => n >= 1) : steps, values: (_, ticks) => ticks.map((t) => plot.format(t)) },
        ],
        series: [{}, ...plot.lines.map((line, i) => ({ stroke: inkOf(line.ink), width: 2, fill: i === 0 ? inkOf(line.ink).replace("rgb(", "rgba(").replace(")", ", .12)") : undefined, points: { show: false }, spanGaps: false }))],
        hooks: { setCursor: [(u) => setAt(u.cursor.idx ?? null)] },
      },
      latest.current,
      box,
    );
    drawn.current = chart;
    const observer = new ResizeObserver(() => box.clientWidth > 0 && chart.setSize({ width: box.clientWidth, height }));
    observer.observe(box);
    return () => {
      observer.disconnect();
      chart.destroy();
    };
  }, [colours, plot]);
  useEffect(() => drawn.current?.setData(data), [data]);

  const pointed = at === null ? undefined : all[at];
  const shown = pointed && !("gap" in pointed) ? pointed : points.at(-1);
  const value = (line: Line) => {
    const n = shown && line.of(shown);
    return n === undefined ? "–" : plot.format(n);
  };
  const most = Math.max(0, ...points.map((p) => plot.lines[0]!.of(p) ?? 0));
  const label = `${plot.title}, over the last ${Math.round(span / 60)} minutes. Now: ${plot.lines.map((l) => `${l.name} ${value(l)}`).join(", ")}. Highest: ${plot.format(most)}.`;
  return (
    <figure class="plot">
      <figcaption>
        <span>
          <b>{plot.title}</b> <small>{shown && shown === pointed ? "at " + clock(shown.at) : ""}</small>
        </span>
        <span class="keys">
          {plot.lines.map((line) => (
            <span key={line.name}>
              <i class={"ink-" + line.ink} aria-hidden="true" /> {line.name} <b>{value(line)}</b>
            </span>
          ))}
        </span>
      </figcaption>
      <div class="canvas" ref={frame} role="img" aria-label={label} />
    </figure>
  );
}

function Figure({ name, value }: { name: string; value: string }) {
  return (
    <div>
      <dt>{name}</dt>
      <dd>{value}</dd>
    </div>
  );
}

export function Traffic({ name }: { name: string }) {
  useFlow();
  const last = flow.last;
  const now: Rates | undefined = flow.rates.get(name);
  const points = flow.history(name);
  const bytes = last?.bytes || points.some((p) => p.bytes > 0);
  const latency = last?.latency || points.some((p) => p.p50);
  if (last?.missing && points.length === 0) return <p class="hint">{sentence(last.missing)}</p>;
  if (!last || !now)
    return (
      <p class="hint" role="status">
        The nodes begin to count …
      </p>
    );
  return (
    <>
      {last.missing && <p class="hint">{sentence("At the moment " + last.missing)}</p>}
      <dl class="figures">
        <Figure name="new a second" value={rate(now.new)} />
        <Figure name="open" value={now.open.toLocaleString("en")} />
        <Figure name="resets a second" value={rate(now.resets)} />
        {bytes && <Figure name="bytes a second" value={size(now.bytes)} />}
        {latency && <Figure name="half answered within" value={now.p50 ? duration(now.p50) : "–"} />}
        {latency && <Figure name="99 % within" value={now.p99 ? duration(now.p99) : "–"} />}
      </dl>
      <div class="plots">
        <Chart plot={plots.new} points={points} />
        <Chart plot={plots.open} points={points} />
        {bytes && <Chart plot={plots.bytes} points={points} />}
        {latency && <Chart plot={plots.latency} points={points} />}
      </div>
      {!last.missing && <Source />}
    </>
  );
}

/** Source says where the figures come from, and what is missing in them. */
function Source() {
  const last = flow.last!;
  const words = `Counted by ${last.nodes === last.of ? (last.of === 1 ? "the node" : `all ${last.of} nodes`) : `${last.nodes} of ${last.of} nodes`}, every ${last.every} s, only while somebody looks.`;
  if (!last.notes?.length) return <p class="hint">{words}</p>;
  return (
    <details class="hint">
      <summary>
        {words} {last.notes.length === 1 ? "One remark." : `${last.notes.length} remarks.`}
      </summary>
      <ul>
        {last.notes.map((note) => (
          <li key={note}>{note}</li>
        ))}
      </ul>
    </details>
  );
}

export const sentence = (text: string) => text.charAt(0).toUpperCase() + text.slice(1) + ".";
