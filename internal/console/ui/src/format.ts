import { useEffect, useState } from "preact/hooks";
import type { Health, Port, Service } from "./types";

/** ago is how long ago something was, short. */
export function ago(time: string | number | Date, now = Date.now()): string {
  const seconds = Math.max(0, Math.round((now - new Date(time).getTime()) / 1000));
  if (seconds < 60) return `${seconds} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min`;
  if (seconds < 48 * 3600) return `${Math.floor(seconds / 3600)} h`;
  return `${Math.floor(seconds / 86400)} d`;
}

/** useNow is the time, told anew every few seconds. */
export function useNow(every = 5000): number {
  const [now, set] = useState(Date.now());
  useEffect(() => {
    const timer = window.setInterval(() => set(Date.now()), every);
    return () => window.clearInterval(timer);
  }, [every]);
  return now;
}

export const count = (n: number, one: string, more = one + "s") => `${n.toLocaleString("en")} ${n === 1 ? one : more}`;

export const rank: Record<Health, number> = { broken: 0, warning: 1, unknown: 2, ok: 3 };

export const healthName: Record<Health, string> = { ok: "healthy", warning: "warning", broken: "broken", unknown: "loading" };

export const portText = (p: Port) => `${p.port}/${p.protocol}`;

/** addressText is what a Service is reached at, in short. */
export function addressText(s: Service): string {
  if (s.type === "ExternalName") return s.cname ?? "";
  if (s.ips?.[0] === "None") return "headless";
  return s.ips?.join(", ") ?? "";
}
