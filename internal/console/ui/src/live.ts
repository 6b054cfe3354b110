// Live connections to the server: server-sent events that start again by themselves.
import { useEffect, useState } from "preact/hooks";
import { flow } from "./flow";
import type { Change, Node, OverviewTraffic, Service, Status } from "./types";

/** base is where the console is served. */
export const base = "/console/";

/** Connection is how a stream is: "live", or not. */
export type Connection = "connecting" | "live" | "lost";

/** ask sends a request and returns the answer; a refusal is thrown as an Error with the server's own words. */
export async function ask<T>(method: "GET" | "POST", path: string, body?: unknown): Promise<T> {
  const response = await fetch(base + "api/" + path, {
    method,
    headers: method === "POST" ? { "Content-Type": "application/json" } : {},
    body: method === "POST" ? JSON.stringify(body ?? {}) : undefined,
  });
  const answer = (await response.json().catch(() => ({}))) as T & { message?: string };
  if (!response.ok) throw new Error(answer.message ?? `the server answered ${response.status}`);
  return answer;
}

/** Stream follows one path until it is closed. It starts again after a failure, and pauses while nobody sees the page. */
export class Stream {
  private source?: EventSource;
  private timer?: number;
  private heard = 0;
  private tries = 0;
  private closed = false;
  private hide = () => this.visibility();

  constructor(
    private path: () => string,
    private events: Record<string, (data: unknown) => void>,
    private state: (connection: Connection) => void,
    private ended: () => void,
  ) {
    document.addEventListener("visibilitychange", this.hide);
    this.open();
  }

  close() {
    this.closed = true;
    document.removeEventListener("visibilitychange", this.hide);
    this.drop();
  }

  /** again asks anew: the path has changed. */
  again() {
    if (this.source) this.open();
  }

  private drop() {
    this.source?.close();
    this.source = undefined;
    window.clearTimeout(this.timer);
  }

  private visibility() {
    if (!document.hidden) {
      if (!this.source) this.open();
      return;
    }
    // Browsers allow few connections to one server; a page that nobody sees leaves its own to others.
    window.clearTimeout(this.timer);
    this.timer = window.setTimeout(() => document.hidden && this.drop(), 60_000);
  }

  private open() {
    this.drop();
    if (this.closed) return;
    const source = new EventSource(base + "api/" + this.path());
    this.source = source;
    this.heard = Date.now();
    for (const [event, got] of Object.entries(this.events))
      source.addEventListener(event, (e) => {
        this.alive();
        got(JSON.parse((e as MessageEvent<string>).data));
      });
    source.addEventListener("ping", () => this.alive());
    source.onerror = () => this.failed();
    this.watch();
  }

  private alive() {
    this.heard = Date.now();
    this.tries = 0;
    this.state("live");
  }

  /** watch notices a connection on which nothing comes any more. */
  private watch() {
    this.timer = window.setTimeout(() => (Date.now() - this.heard > 25_000 ? this.failed() : this.watch()), 5_000);
  }

  private failed() {
    this.drop();
    if (this.closed) return;
    this.state("lost");
    const again = () => {
      this.timer = window.setTimeout(() => this.open(), Math.min(500 * 2 ** this.tries++, 3_000));
    };
    // An EventSource does not say why it failed.
    ask<{ user: string }>("GET", "session").then((session) => (session.user ? again() : this.ended()), again);
  }
}

/** World is what the overview knows. */
export class World {
  services = new Map<string, Service>();
  nodes = new Map<string, Node>();
  status?: Status;
  connection: Connection = "connecting";
  private position = "";
  private traffic = false;
  private listeners = new Set<() => void>();
  private scheduled = false;
  private stream?: Stream;

  start(ended: () => void) {
    this.stream?.close();
    this.stream = new Stream(
      () => "stream?" + new URLSearchParams({ ...(this.position ? { since: this.position } : {}), ...(this.traffic ? { traffic: "true" } : {}) }),
      { change: (data) => this.apply(data as Change), traffic: (data) => flow.takeAll(data as OverviewTraffic) },
      (connection) => {
        if (this.connection === connection) return;
        this.connection = connection;
        this.notify();
      },
      ended,
    );
  }

  /** wantTraffic has nodes asked how much goes through all Services: nothing is counted for pages that don't show it. */
  wantTraffic(on: boolean) {
    if (this.traffic === on) return;
    this.traffic = on;
    this.stream?.again();
  }

  stop() {
    flow.clear();
    this.stream?.close();
    this.stream = undefined;
    this.position = "";
    this.services.clear();
    this.nodes.clear();
    this.status = undefined;
    this.connection = "connecting";
  }

  private apply(change: Change) {
    if (change.reset) {
      this.services.clear();
      this.nodes.clear();
    }
    for (const s of change.services ?? []) this.services.set(s.ns + "/" + s.name, s);
    for (const name of change.goneServices ?? []) this.services.delete(name);
    for (const n of change.nodes ?? []) this.nodes.set(n.name, n);
    for (const name of change.goneNodes ?? []) this.nodes.delete(name);
    if (change.status) this.status = change.status;
    this.position = `${change.feed}.${change.rev}`;
    this.notify();
  }

  private notify() {
    if (this.scheduled) return;
    this.scheduled = true;
    queueMicrotask(() => {
      this.scheduled = false;
      for (const listener of this.listeners) listener();
    });
  }

  listen(listener: () => void) {
    this.listeners.add(listener);
    return () => void this.listeners.delete(listener);
  }
}

export const world = new World();

/** useWorld draws a component anew whenever the world changed, and returns a number that does. */
export function useWorld(): number {
  const [version, set] = useState(0);
  useEffect(() => world.listen(() => set((n) => n + 1)), []);
  return version;
}
