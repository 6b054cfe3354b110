// What goes through Services, and a few minutes of what did: the server keeps no history.
import { useEffect, useState } from "preact/hooks";
import type { Collected, OverviewTraffic, Rates, ServiceTraffic } from "./types";

export interface Point extends Rates {
  /** at is in seconds, as uPlot has it. */
  at: number;
}

/** span is how many seconds are kept. */
export const span = 300;
/** maxHistories is of how many Services. */
const maxHistories = 2000;

export class Flow {
  /** last is what was collected last, without its Services. */
  last?: Collected;
  rates = new Map<string, Rates>();
  endpoints: Record<string, Rates> = {};
  private histories = new Map<string, Point[]>();
  private listeners = new Set<() => void>();

  takeAll(data: OverviewTraffic) {
    this.last = data;
    this.rates = new Map(Object.entries(data.services).map(([key, [added, open, bytes, resets]]) => [key, { new: added, open, bytes, resets }]));
    if (!data.missing) {
      const at = Date.parse(data.at) / 1000;
      for (const [key, rates] of this.rates) this.add(key, { ...rates, at });
      // Those that were busy and are not any more.
      for (const [key, points] of this.histories) if (!this.rates.has(key) && points.at(-1)!.at < at) this.add(key, { at, new: 0, open: 0, bytes: 0, resets: 0 });
    }
    this.notify();
  }

  takeOne(key: string, data: ServiceTraffic) {
    this.last = data;
    if (!data.missing) {
      this.rates.set(key, data.rates);
      this.endpoints = data.endpoints;
      this.add(key, { ...data.rates, at: Date.parse(data.at) / 1000 });
    }
    this.notify();
  }

  private add(key: string, point: Point) {
    const points = this.histories.get(key) ?? [];
    if (points.length === 0 && this.histories.size >= maxHistories) this.histories.delete(this.histories.keys().next().value!);
    const old = points.at(-1);
    if (old && old.at >= point.at) return;
    points.push(point);
    while (points[0]!.at < point.at - span) points.shift();
    this.histories.set(key, points);
  }

  history(key: string): Point[] {
    return this.histories.get(key) ?? [];
  }

  clear() {
    this.last = undefined;
    this.rates.clear();
    this.histories.clear();
    this.endpoints = {};
  }

  private notify() {
    for (const listener of this.listeners) listener();
  }

  listen(listener: () => void) {
    this.listeners.add(listener);
    return () => void this.listeners.delete(listener);
  }
}

export const flow = new Flow();

/** useFlow draws a component anew whenever figures have come, and returns a number that changes then. */
export function useFlow(): number {
  const [version, set] = useState(0);
  useEffect(() => flow.listen(() => set((n) => n + 1)), []);
  return version;
}

/** rate is a number a second, short. */
export const rate = (n: number) => (n === 0 ? "0" : n < 10 ? n.toFixed(1) : Math.round(n).toLocaleString("en"));

const units = ["B", "kB", "MB", "GB", "TB"];

/** size is a number of bytes, short. */
export function size(n: number): string {
  let unit = 0;
  for (; n >= 1000 && unit < units.length - 1; unit++) n /= 1000;
  return `${n < 10 && unit > 0 ? n.toFixed(1) : Math.round(n)} ${units[unit]}`;
}

/** duration is a number of seconds, short. */
export const duration = (s: number) => (s >= 1 ? `${s.toFixed(s < 10 ? 1 : 0)} s` : s >= 0.001 ? `${(s * 1000).toFixed(s < 0.01 ? 1 : 0)} ms` : `${Math.round(s * 1e6)} µs`);
