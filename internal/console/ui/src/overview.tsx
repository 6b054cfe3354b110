import { Component } from "preact";
import { useEffect, useLayoutEffect, useMemo, useRef, useState } from "preact/hooks";
import { addressText, ago, count, healthName, portText, rank, useNow } from "./format";
import { flow, rate, useFlow } from "./flow";
import { ask, useWorld, world } from "./live";
import { sentence } from "./plots";
import { go, href, Link, type Place } from "./router";
import type { Health, Service } from "./types";

type Sort = "health" | "name" | "type" | "address" | "endpoints" | "traffic" | "age";

const orders: Record<Sort, (a: Service, b: Service) => number> = {
  health: (a, b) => rank[a.health] - rank[b.health],
  name: () => 0,
  type: (a, b) => a.type.localeCompare(b.type),
  address: (a, b) => compareAddresses(a.ips?.[0] ?? "", b.ips?.[0] ?? ""),
  endpoints: (a, b) => a.ready - b.ready || a.total - b.total,
  traffic: (a, b) => newRate(b) - newRate(a) || (flow.rates.get(keyOf(b))?.open ?? 0) - (flow.rates.get(keyOf(a))?.open ?? 0),
  age: (a, b) => (a.created < b.created ? 1 : a.created > b.created ? -1 : 0),
};

const keyOf = (s: Service) => s.ns + "/" + s.name;
const newRate = (s: Service) => flow.rates.get(keyOf(s))?.new ?? 0;
const pad = (address: string) => (address.includes(".") ? address.split(".").map((n) => n.padStart(3, "0")).join(".") : "~" + address);
const compareAddresses = (a: string, b: string) => (pad(a) < pad(b) ? -1 : pad(a) > pad(b) ? 1 : 0);
const byName = (a: Service, b: Service) => (a.ns < b.ns ? -1 : a.ns > b.ns ? 1 : a.name < b.name ? -1 : a.name > b.name ? 1 : 0);

/** matches says whether all words of a filter are somewhere in what a row shows. */
function matches(s: Service, words: string[]): boolean {
  if (words.length === 0) return true;
  const text = `${s.ns}/${s.name} ${s.type} ${s.ips?.join(" ") ?? ""} ${s.external?.join(" ") ?? ""} ${s.lb?.join(" ") ?? ""} ${s.cname ?? ""} ${
    s.ports?.map((p) => `${p.name ?? ""} ${portText(p)} ${p.nodePort ?? ""}`).join(" ") ?? ""
  } ${s.problem ?? ""}`.toLowerCase();
  return words.every((word) => text.includes(word));
}

export function Overview({ place }: { place: Place }) {
  const version = useWorld();
  const query = place.query.get("q") ?? "";
  const health = place.query.get("health") as Health | null;
  const namespace = place.query.get("ns") ?? "";
  const sort = (place.query.get("sort") as Sort | null) ?? "health";
  const down = place.query.get("down") === "1";
  const filter = useRef<HTMLInputElement>(null);
  const counts = useFlow();
  useEffect(() => {
    world.wantTraffic(true);
    return () => world.wantTraffic(false);
  }, []);

  const set = (changes: Record<string, string>) => {
    const next = new URLSearchParams(place.query);
    for (const [name, value] of Object.entries(changes)) value ? next.set(name, value) : next.delete(name);
    go(href([], next), true);
  };

  const all = useMemo(() => [...world.services.values()], [version]);
  const totals = useMemo(() => {
    const out: Record<Health, number> = { ok: 0, warning: 0, broken: 0, unknown: 0 };
    for (const s of all) out[s.health]++;
    return out;
  }, [all]);
  const namespaces = useMemo(() => [...new Set(all.map((s) => s.ns))].sort(), [all]);
  const rows = useMemo(() => {
    const words = query.toLowerCase().split(/\s+/).filter(Boolean);
    const order = orders[sort] ?? orders.health;
    const sign = down ? -1 : 1;
    return all
      .filter((s) => (!health || s.health === health) && (!namespace || s.ns === namespace) && matches(s, words))
      .sort((a, b) => sign * order(a, b) || (sort === "name" ? sign : 1) * byName(a, b));
  }, [all, query, health, namespace, sort, down, sort === "traffic" ? counts : 0]);

  useEffect(() => {
    document.title = (totals.broken ? `(${totals.broken}) ` : "") + "Services · Portal";
  }, [totals.broken]);
  useEffect(() => {
    const key = (e: KeyboardEvent) => {
      if (e.key !== "/" || e.ctrlKey || e.metaKey || /^(INPUT|SELECT|TEXTAREA)$/.test((e.target as HTMLElement).tagName)) return;
      e.preventDefault();
      filter.current?.focus();
      filter.current?.select();
    };
    window.addEventListener("keydown", key);
    return () => window.removeEventListener("keydown", key);
  }, []);

  return (
    <>
      <h1 class="hidden">Services</h1>
      <section class="tiles" aria-label="How things are">
        <Tile n={totals.broken} name="broken" kind="broken" on={health === "broken"} click={() => set({ health: health === "broken" ? "" : "broken" })} />
        <Tile n={totals.warning} name={totals.warning === 1 ? "warning" : "warnings"} kind="warning" on={health === "warning"} click={() => set({ health: health === "warning" ? "" : "warning" })} />
        <Tile n={totals.ok} name="healthy" kind="ok" on={health === "ok"} click={() => set({ health: health === "ok" ? "" : "ok" })} />
        <NodesTile />
        <TrafficTile />
      </section>
      <Limits />
      <section class="tools" role="search">
        <input
          ref={filter}
          type="search"
          aria-label="Filter Services"
          placeholder="Filter by name, address, port, problem   ( / )"
          value={query}
          onInput={(e) => set({ q: e.currentTarget.value })}
          onKeyDown={(e) => {
            if (e.key === "Escape") set({ q: "" });
            if (e.key === "ArrowDown") document.querySelector<HTMLElement>(".rows [tabindex='0']")?.focus();
          }}
        />
        <select aria-label="Namespace" value={namespace} onChange={(e) => set({ ns: e.currentTarget.value })}>
          <option value="">All namespaces</option>
          {namespaces.map((n) => (
            <option key={n} value={n}>
              {n}
            </option>
          ))}
        </select>
        <span class="found" role="status">
          {rows.length === all.length ? count(all.length, "Service") : `${rows.length.toLocaleString("en")} of ${count(all.length, "Service")}`}
        </span>
      </section>
      <TrafficNote />
      <Table rows={rows} counts={counts} sort={sort} down={down} by={(column) => set({ sort: column === "health" ? "" : column, down: column === sort && !down ? "1" : "" })} />
      {all.length === 0 && world.status?.synced && <Empty />}
      {all.length > 0 && rows.length === 0 && <p class="empty">No Service matches the filter.</p>}
    </>
  );
}

function Tile({ n, name, kind, on, click }: { n: number; name: string; kind: Health; on: boolean; click: () => void }) {
  return (
    <button class={`tile ${n || kind === "ok" ? kind : "none"}`} aria-pressed={on} onClick={click}>
      <b>{n.toLocaleString("en")}</b> <span>{name}</span>
    </button>
  );
}

function NodesTile() {
  const nodes = [...world.nodes.values()];
  if (nodes.length === 0) return null;
  const ready = nodes.filter((n) => n.ready).length;
  const zones = new Set(nodes.map((n) => n.zone).filter(Boolean)).size;
  return (
    <Link to={href(["nodes"])} class={"tile " + (ready < nodes.length ? "broken" : "ok")}>
      <b>{ready < nodes.length ? `${ready} of ${nodes.length}` : ready}</b>{" "}
      <span>
        {nodes.length === 1 ? "node" : "nodes"} ready{zones > 1 ? `, ${zones} zones` : ""}
      </span>
    </Link>
  );
}

/** TrafficTile is what goes through all Services together. */
function TrafficTile() {
  if (!flow.last || flow.last.missing) return null;
  let added = 0;
  let open = 0;
  for (const r of flow.rates.values()) {
    added += r.new;
    open += r.open;
  }
  return (
    <div class="tile">
      <b>{rate(added)}/s</b> <span>new connections, {open.toLocaleString("en")} open</span>
    </div>
  );
}

/** TrafficNote says why there are no live figures, or not all. */
function TrafficNote() {
  const last = flow.last;
  if (!last || (!last.missing && last.nodes === last.of)) return null;
  return (
    <p class="hint small">
      {last.missing ? sentence("No live rates: " + last.missing) : `Live rates are those of ${last.nodes} of ${last.of} nodes. ${last.notes?.map(sentence).join(" ") ?? ""}`}
    </p>
  );
}

/** Limits says what this user may not see, so that nobody takes a part for the whole. */
function Limits() {
  const status = world.status;
  if (!status?.limits?.length) return null;
  return (
    <p class="banner note">
      {status.all ? "All namespaces are shown. " : status.namespaces?.length ? `Shown: ${status.namespaces.join(", ")}. ` : ""}
      You may not see: {status.limits.join(", ")}.
    </p>
  );
}

function Empty() {
  const [names, setNames] = useState("");
  const [problem, setProblem] = useState("");
  if (world.status?.all || world.status?.namespaces?.length) return <p class="empty">There are no Services here.</p>;
  const submit = (e: Event) => {
    e.preventDefault();
    ask("POST", "namespaces", { namespaces: names.split(/[\s,]+/).filter(Boolean) }).then(
      () => setProblem(""),
      (error: Error) => setProblem(error.message),
    );
  };
  return (
    <form class="empty" onSubmit={submit}>
      <h2>Which namespaces are yours?</h2>
      <p>You may not list Services of all namespaces, nor the namespaces themselves.</p>
      <p class="error" role="alert">
        {problem}
      </p>
      <label>
        Namespaces <input value={names} placeholder="shop, billing" onInput={(e) => setNames(e.currentTarget.value)} />
      </label>{" "}
      <button class="primary">Show</button>
    </form>
  );
}

const columns: [Sort, string, string][] = [
  ["health", "", "Health"],
  ["name", "Service", "Service"],
  ["type", "Type", "Type"],
  ["address", "Address", "Address"],
  ["endpoints", "Endpoints", "Endpoints"],
  ["traffic", "New/s", "New/s (new connections a second)"],
  ["age", "Age", "Age"],
];

/** useRowHeight is the height of a row, which the style sheet has: rows of a phone are higher. */
function useRowHeight(): number {
  const media = useMemo(() => window.matchMedia("(max-width: 760px)"), []);
  const [narrow, set] = useState(media.matches);
  useEffect(() => {
    const look = () => set(media.matches);
    media.addEventListener("change", look);
    return () => media.removeEventListener("change", look);
  }, [media]);
  return narrow ? 76 : 48;
}

/** rated says whether there are live rates: without them there is no column for them. */
const rated = () => flow.last !== undefined && !flow.last.missing;

/** step is how many rows are drawn, and left out, at once. */
const step = 10;

/** Table draws the rows that can be seen, and some more: ten thousand of them scroll as ten do. */
function Table({ rows, counts, sort, down, by }: { rows: Service[]; counts: number; sort: Sort; down: boolean; by: (s: Sort) => void }) {
  const body = useRef<HTMLDivElement>(null);
  const height = useRowHeight();
  const [view, setView] = useState({ first: 0, last: 40 });
  const [selected, setSelected] = useState<string>();
  const place = useRef(0);
  const focus = useRef(false);
  const now = useNow();
  // The selection stays with its Service when rows move, and where it was when that one goes.
  const found = useMemo(() => rows.findIndex((s) => keyOf(s) === selected), [rows, selected]);
  const current = found >= 0 ? found : Math.min(place.current, rows.length - 1);
  place.current = Math.max(0, current);

  const measure = () => {
    if (!body.current) return;
    const top = -body.current.getBoundingClientRect().top;
    // In steps, so that not every move of the wheel draws anew.
    const first = Math.max(0, Math.floor(top / height / step) * step - step);
    const last = Math.min(rows.length, Math.ceil((top + window.innerHeight) / height / step) * step + step);
    setView((old) => (old.first === first && old.last === last ? old : { first, last }));
  };
  useLayoutEffect(measure, [rows.length, height]);
  useEffect(() => {
    window.addEventListener("scroll", measure, { passive: true });
    window.addEventListener("resize", measure);
    return () => {
      window.removeEventListener("scroll", measure);
      window.removeEventListener("resize", measure);
    };
  });
  // As soon as the row is there: a later effect of an earlier drawing would take the row that was selected then.
  useLayoutEffect(() => {
    if (!focus.current) return;
    focus.current = false;
    body.current?.querySelector<HTMLElement>("[tabindex='0']")?.focus({ preventScroll: true });
  });

  const select = (index: number) => {
    const next = Math.max(0, Math.min(rows.length - 1, index));
    const box = body.current!.getBoundingClientRect();
    const top = box.top + next * height;
    const margin = height + 60;
    if (top < margin) window.scrollBy(0, top - margin);
    else if (top + height > window.innerHeight) window.scrollBy(0, top + height - window.innerHeight + 8);
    focus.current = true;
    setSelected(keyOf(rows[next]!));
    measure();
  };
  const page = Math.max(1, Math.floor(window.innerHeight / height) - 3);
  const moves: Record<string, number> = { ArrowDown: 1, j: 1, ArrowUp: -1, k: -1, PageDown: page, PageUp: -page, Home: -Infinity, End: Infinity };
  const key = (e: KeyboardEvent) => {
    const by = moves[e.key];
    if (by === undefined || e.ctrlKey || e.metaKey || e.altKey) return;
    e.preventDefault();
    select(by === Infinity ? rows.length - 1 : by === -Infinity ? 0 : current + by);
  };

  // A row that got the focus in another way, by a click or Tab, is the selected one.
  const follow = (e: FocusEvent) => {
    const row = (e.target as HTMLElement).closest("[aria-rowindex]");
    const s = row && rows[Number(row.getAttribute("aria-rowindex")) - 2];
    if (s) setSelected(keyOf(s));
  };

  if (rows.length === 0) return null;
  const shown = rows.slice(view.first, view.last);
  // The selected row stays in the page, so that the keyboard's focus is not lost.
  const extra = current < view.first || current >= view.last ? [rows[current]!] : [];
  return (
    <div class={rated() ? "table rated" : "table"} role="table" aria-label="Services" aria-rowcount={rows.length + 1}>
      <div class="head" role="row" aria-rowindex={1}>
        {columns.filter(([column]) => column !== "traffic" || rated()).map(([column, name, label]) => (
          <span key={column} role="columnheader" class={"c-" + column} aria-sort={sort === column ? (down ? "descending" : "ascending") : "none"}>
            <button onClick={() => by(column)} aria-label={`Sort by ${label.toLowerCase()}`} title={`Sort by ${label.toLowerCase()}`}>
              {name}
              {sort === column ? <i aria-hidden="true">{down ? "▾" : "▴"}</i> : ""}
            </button>
          </span>
        ))}
      </div>
      <div class="rows" role="rowgroup" ref={body} onKeyDown={key} onFocusIn={follow} style={{ height: `${rows.length * height}px` }}>
        {[...shown, ...extra].map((s, i) => {
          const index = i < shown.length ? view.first + i : current;
          return <TableRow key={s.ns + "/" + s.name} s={s} index={index} top={index * height} selected={index === current} now={now} counts={flow.rates.has(keyOf(s)) || flow.history(keyOf(s)).length > 0 ? counts : rated() ? -1 : 0} />;
        })}
      </div>
    </div>
  );
}

interface RowProps {
  s: Service;
  index: number;
  top: number;
  selected: boolean;
  now: number;
  /** counts changes when the row's figures may have. */
  counts: number;
}

class TableRow extends Component<RowProps> {
  override shouldComponentUpdate(next: RowProps) {
    const old = this.props;
    return next.s !== old.s || next.top !== old.top || next.selected !== old.selected || next.now !== old.now || next.counts !== old.counts;
  }

  override render(props: RowProps) {
    return <RowCells {...props} />;
  }
}

function RowCells({ s, index, top, selected, now }: RowProps) {
  return (
    <div class={"row " + s.health} role="row" aria-rowindex={index + 2} style={{ transform: `translateY(${top}px)` }}>
      <span role="cell" class="c-health">
        <HealthIcon health={s.health} />
      </span>
      <span role="cell" class="c-name">
        <Link to={href(["services", s.ns, s.name])} tabIndex={selected ? 0 : -1}>
          <b>{s.name}</b> <small>{s.ns}</small>
        </Link>
        {s.problem && <em title={s.problem}>{s.problem}</em>}
      </span>
      <span role="cell" class="c-type">
        {s.type}
      </span>
      <span role="cell" class="c-address">
        {addressText(s)} <small>{[...(s.lb ?? []), ...(s.ports?.map(portText) ?? [])].join(" ")}</small>
      </span>
      <span role="cell" class="c-endpoints">
        {s.type === "ExternalName" ? <small>outside</small> : <Meter ready={s.ready} total={s.total} />}
      </span>
      {rated() && (
        <span role="cell" class="c-traffic">
          <RowTraffic name={keyOf(s)} />
        </span>
      )}
      <span role="cell" class="c-age">
        {ago(s.created, now)}
      </span>
    </div>
  );
}

/** sparkPoints is how many figures a row's little line has. */
const sparkPoints = 30;

function RowTraffic({ name }: { name: string }) {
  const now = flow.rates.get(name);
  const points = flow.history(name).slice(-sparkPoints);
  const most = Math.max(1, ...points.map((p) => p.new));
  const line = points.map((p, i) => `${i ? "L" : "M"}${((i + sparkPoints - points.length) * 56) / (sparkPoints - 1)} ${(17 - (15 * p.new) / most).toFixed(1)}`).join("");
  return (
    <span class="flow" title={now ? `${rate(now.new)} new connections a second, ${now.open} open, ${rate(now.resets)} resets a second` : "no traffic"}>
      <svg width="56" height="18" aria-hidden="true">
        {points.length > 1 && <path d={line} />}
      </svg>
      {now ? rate(now.new) : 0} {now && now.open > 0 ? <small>{now.open.toLocaleString("en")} open</small> : null}
    </span>
  );
}

export function Meter({ ready, total }: { ready: number; total: number }) {
  const part = total ? Math.min(1, ready / total) : 0;
  return (
    <span class="meter">
      <svg width="44" height="6" aria-hidden="true">
        <rect class="track" width="44" height="6" rx="3" />
        <rect class={part === 1 ? "full" : "part"} width={44 * part} height="6" rx="3" />
      </svg>
      {ready}
      <small>/{Math.max(total, ready)} ready</small>
    </span>
  );
}

/** HealthIcon differs by shape too, for those who see no red and green. */
export function HealthIcon({ health, size = 18 }: { health: Health; size?: number }) {
  const shape = {
    ok: <path d="M5 9.5l3 3 5-6" />,
    warning: <path d="M9 4.5v5.5M9 13v.4" />,
    broken: <path d="M6 6l6 6M12 6l-6 6" />,
    unknown: <path d="M5.5 9h.2M9 9h.2M12.5 9h.2" />,
  }[health];
  return (
    <svg class={"icon " + health} width={size} height={size} viewBox="0 0 18 18" role="img" aria-label={healthName[health]}>
      {health === "warning" ? <path class="bg" d="M9 1l8.5 15.5H.5z" /> : health === "broken" ? <path class="bg" d="M5.5.5h7l5 5v7l-5 5h-7l-5-5v-7z" /> : <circle class="bg" cx="9" cy="9" r="8.5" />}
      <g class="fg">{shape}</g>
    </svg>
  );
}
