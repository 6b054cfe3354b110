// The picture of a Service: name → addresses → policy → endpoints → nodes, and where that breaks.
import { useEffect, useRef, useState } from "preact/hooks";
import type { Detail, Endpoint, Health } from "./types";

type State = Health | "idle";

/** Flow is whether packets go along a line: they do, nobody expects them to, or they should and can't. */
type Flow = "flows" | "idle" | "cut";

interface Link {
  id: string;
  flow: Flow;
}

interface Box {
  id: string;
  title: string;
  lines: string[];
  state: State;
  /** from are the boxes of the stage before that lead here. */
  from: Link[];
}

interface Stage {
  name: string;
  boxes: Box[];
  health: Health;
}

const maxEndpoints = 6;
const maxBoxes = 6;

const endpointState = (e: Endpoint): State => (e.ready ? "ok" : e.terminating ? (e.serving ? "warning" : "idle") : "broken");
const endpointFlow = (e: Endpoint): Flow => (e.ready || (e.terminating && e.serving) ? "flows" : e.terminating ? "idle" : "cut");
const endpointWord = (e: Endpoint) => (e.ready ? "ready" : e.terminating ? (e.serving ? "terminating, serves" : "terminating") : "not ready");

/** stagesOf says what is drawn; how is decided below. */
export function stagesOf(d: Detail): Stage[] {
  const s = d.service;
  const at = (stage: string): Health => (s.stage === stage ? s.health : "ok");
  const name: Stage = {
    name: "Name",
    health: at("name"),
    boxes: [{ id: "name", title: `${s.name}.${s.ns}.svc`, lines: [s.type], state: at("name"), from: [] }],
  };
  if (s.type === "ExternalName") {
    const flow = at("name") === "broken" ? "cut" : "flows";
    return [name, { name: "Outside", health: at("name"), boxes: [{ id: "cname", title: s.cname ?? "", lines: ["CNAME: DNS leads there"], state: at("name"), from: [{ id: "name", flow }] }] }];
  }
  const addresses: Box[] = [];
  const lead: Link[] = [{ id: "name", flow: "flows" }];
  if (d.headless) addresses.push({ id: "headless", title: "headless", lines: ["DNS answers with the endpoints"], state: "ok", from: lead });
  else for (const ip of s.ips ?? []) addresses.push({ id: ip, title: ip, lines: ["cluster IP"], state: "ok", from: lead });
  for (const ip of s.external ?? []) addresses.push({ id: ip, title: ip, lines: ["external IP"], state: "ok", from: [] });
  for (const ip of s.lb ?? []) addresses.push({ id: ip, title: ip, lines: ["load balancer"], state: "ok", from: [] });
  if (s.type === "LoadBalancer" && !s.lb?.length) addresses.push({ id: "pending", title: "no address yet", lines: ["load balancer"], state: "warning", from: [] });
  const nodePorts = (s.ports ?? []).filter((p) => p.nodePort);
  if (nodePorts.length) addresses.push({ id: "nodeport", title: nodePorts.map((p) => p.nodePort).slice(0, 2).join(", ") + (nodePorts.length > 2 ? " …" : ""), lines: ["node port, on every node"], state: "ok", from: [] });
  const address: Stage = { name: d.headless ? "Address" : "Addresses", health: at("address"), boxes: limit(addresses, "addresses") };

  const policies = d.policies ?? [];
  const ports = (s.ports ?? []).map((p) => `${p.port} → ${p.target ?? p.port}/${p.protocol}`);
  const policy: Stage = {
    name: "Policy",
    health: "ok",
    boxes: [
      {
        id: "policy",
        title: policies.length ? policies.map((p) => (p.value === "true" ? p.name : p.value)).join(", ") : "any endpoint",
        lines: [...policies.map((p) => p.name).slice(0, 2), ...ports.slice(0, 3), ...(ports.length > 3 ? [`and ${ports.length - 3} more ports`] : [])],
        state: "ok",
        from: address.boxes.map((b) => ({ id: b.id, flow: b.state === "warning" ? "cut" : "flows" })),
      },
    ],
  };

  const all = [...(d.endpoints ?? [])];
  const order = { broken: 0, warning: 1, idle: 2, ok: 3, unknown: 4 };
  const picked = all.length > maxEndpoints ? pick(all) : all;
  const endpointBoxes: Box[] = picked.map((e) => ({
    id: e.address,
    title: e.address,
    lines: [endpointWord(e), e.pod ?? ""].filter(Boolean),
    state: endpointState(e),
    from: [{ id: "policy", flow: endpointFlow(e) }],
  }));
  endpointBoxes.sort((a, b) => order[a.state] - order[b.state]);
  const hidden = all.length - picked.length + (d.more ?? 0);
  if (hidden > 0) {
    const ready = all.filter((e) => e.ready && !picked.includes(e)).length;
    endpointBoxes.push({ id: "more", title: `${hidden} more`, lines: [`${ready} of them ready`], state: "idle", from: [{ id: "policy", flow: ready > 0 ? "flows" : "cut" }] });
  }
  if (endpointBoxes.length === 0) {
    endpointBoxes.push({ id: "none", title: "no endpoints", lines: [d.selector ? "no Pod matches" : "no selector"], state: "broken", from: [{ id: "policy", flow: "cut" }] });
  }
  const endpoints: Stage = { name: "Endpoints", health: at("endpoints"), boxes: endpointBoxes };

  const known = new Map((d.nodes ?? []).map((n) => [n.name, n]));
  const nodes = new Map<string, Box>();
  for (const e of picked) {
    if (!e.node) continue;
    const node = known.get(e.node);
    const box = nodes.get(e.node) ?? {
      id: "node/" + e.node,
      title: e.node,
      lines: [node ? (node.ready ? "ready" : "not ready") : "", node?.zone ?? e.zone ?? ""].filter(Boolean),
      state: node && !node.ready ? "broken" : "ok",
      from: [],
    };
    box.from.push({ id: e.address, flow: box.state === "broken" ? "cut" : endpointFlow(e) === "flows" ? "flows" : "idle" });
    nodes.set(e.node, box);
  }
  const stages = [name, address, policy, endpoints];
  if (nodes.size) stages.push({ name: "Nodes", health: at("nodes"), boxes: limit([...nodes.values()], "nodes") });
  return stages;
}

/** pick chooses the endpoints that say most: those with a problem, then some of the others from as many nodes as there are. */
function pick(all: Endpoint[]): Endpoint[] {
  const bad = all.filter((e) => !e.ready).slice(0, maxEndpoints - 2);
  const byNode = new Map<string, Endpoint[]>();
  for (const e of all) if (e.ready) byNode.set(e.node ?? "", [...(byNode.get(e.node ?? "") ?? []), e]);
  const out = [...bad];
  for (let turn = 0; out.length < maxEndpoints; turn++) {
    const next = [...byNode.values()].map((list) => list[turn]).filter((e) => e !== undefined);
    if (next.length === 0) break;
    out.push(...next.slice(0, maxEndpoints - out.length));
  }
  return out;
}

function limit(boxes: Box[], what: string): Box[] {
  if (boxes.length <= maxBoxes) return boxes;
  const kept = boxes.slice(0, maxBoxes - 1);
  const rest = boxes.slice(maxBoxes - 1);
  return [...kept, { id: "rest-" + what, title: `${rest.length} more`, lines: [what], state: rest.some((b) => b.state === "broken") ? "broken" : "idle", from: rest.flatMap((b) => b.from) }];
}

interface Placed extends Box {
  x: number;
  y: number;
  w: number;
  h: number;
}

const lineHeight = 16;
const heightOf = (b: Box) => 34 + b.lines.length * lineHeight;
const gap = 12;

/** place lays the stages side by side, or below each other where there is no room. */
function place(stages: Stage[], width: number): { boxes: Map<string, Placed>; heads: { name: string; x: number; y: number }[]; height: number; vertical: boolean } {
  const boxes = new Map<string, Placed>();
  const heads: { name: string; x: number; y: number }[] = [];
  if (width < 700) {
    let y = 0;
    for (const stage of stages) {
      heads.push({ name: stage.name, x: 0, y: y + 14 });
      y += 24;
      const columns = stage.boxes.length > 1 && width >= 330 ? 2 : 1;
      const w = (width - gap * (columns - 1)) / columns;
      for (let i = 0; i < stage.boxes.length; i += columns) {
        const line = stage.boxes.slice(i, i + columns);
        const h = Math.max(...line.map(heightOf));
        line.forEach((b, j) => boxes.set(b.id, { ...b, x: j * (w + gap), y, w, h }));
        y += h + gap;
      }
      y += 22;
    }
    return { boxes, heads, height: y - 22, vertical: true };
  }
  const between = 46;
  const w = Math.min(230, (width - between * (stages.length - 1)) / stages.length);
  const step = w + (stages.length > 1 ? Math.min(110, (width - w * stages.length) / (stages.length - 1)) : 0);
  const heights = stages.map((s) => s.boxes.reduce((sum, b) => sum + heightOf(b) + gap, -gap));
  const tallest = Math.max(...heights);
  stages.forEach((stage, i) => {
    heads.push({ name: stage.name, x: i * step, y: 14 });
    let y = 28 + (tallest - heights[i]!) / 2;
    for (const b of stage.boxes) {
      boxes.set(b.id, { ...b, x: i * step, y, w, h: heightOf(b) });
      y += heightOf(b) + gap;
    }
  });
  return { boxes, heads, height: tallest + 34, vertical: false };
}

/** fit shortens what is wider than its box: about 7.4 units a letter. */
const fit = (text: string, width: number, letter = 7.4) => {
  const room = Math.floor((width - 26) / letter);
  return text.length <= room ? text : text.slice(0, Math.max(1, room - 1)) + "…";
};

export function Chain({ detail }: { detail: Detail }) {
  const frame = useRef<HTMLDivElement>(null);
  const [width, setWidth] = useState(0);
  useEffect(() => {
    const observer = new ResizeObserver((entries) => setWidth(Math.floor(entries[0]!.contentRect.width)));
    observer.observe(frame.current!);
    return () => observer.disconnect();
  }, []);
  const stages = stagesOf(detail);
  const words = stages.map((s) => `${s.name}: ${s.boxes.map((b) => [b.title, ...b.lines].join(" ")).join("; ")}`).join(". ");
  return (
    <div class="chain" ref={frame} data-health={detail.service.health} data-stage={detail.service.stage ?? ""}>
      {width > 0 && <Picture stages={stages} width={width} label={`The way of a packet. ${words}. ${detail.service.problem ?? "Nothing is broken."}`} />}
    </div>
  );
}

function Picture({ stages, width, label }: { stages: Stage[]; width: number; label: string }) {
  const { boxes, heads, height, vertical } = place(stages, width);
  const edges: { from: Placed; to: Placed; flow: Flow }[] = [];
  for (const to of boxes.values())
    for (const link of to.from) {
      const from = boxes.get(link.id);
      if (from) edges.push({ from, to, flow: link.flow });
    }
  const order = { idle: 0, flows: 1, cut: 2 }; // what is drawn last is on top
  edges.sort((a, b) => order[a.flow] - order[b.flow]);
  return (
    <svg width={width} height={height} viewBox={`0 0 ${width} ${height}`} role="img" aria-label={label}>
      {heads.map((h, i) => (
        <text key={h.name} class={"stage " + stages[i]!.health} x={h.x} y={h.y}>
          {i + 1}. {h.name}
        </text>
      ))}
      {vertical
        ? stages.slice(1).map((stage, i) => {
            const first = boxes.get(stage.boxes[0]!.id)!;
            const links = stage.boxes.flatMap((b) => b.from);
            return <Down key={i} x={width / 2} y={first.y - 44} flow={links.some((l) => l.flow === "flows") ? "flows" : "cut"} />;
          })
        : edges.map(({ from, to, flow }) => <Edge key={from.id + ">" + to.id} from={from} to={to} flow={flow} />)}
      {[...boxes.values()].map((b) => (
        <g key={b.id} class={"box " + b.state} transform={`translate(${b.x},${b.y})`}>
          <title>{[b.title, ...b.lines].join(", ")}</title>
          <rect width={b.w} height={b.h} rx="8" />
          <rect class="stripe" width="5" height={b.h} rx="2.5" />
          <text class="title" x="15" y="22">
            {fit(b.title, b.w, 8.3)}
          </text>
          {b.lines.map((line, i) => (
            <text key={i} x="15" y={40 + i * lineHeight}>
              {fit(line, b.w, 6.7)}
            </text>
          ))}
        </g>
      ))}
    </svg>
  );
}

function Edge({ from, to, flow }: { from: Placed; to: Placed; flow: Flow }) {
  const x1 = from.x + from.w;
  const y1 = from.y + from.h / 2;
  const x2 = to.x;
  const y2 = to.y + to.h / 2;
  const mid = (x1 + x2) / 2;
  return (
    <g class={"edge " + flow}>
      <path d={`M${x1} ${y1}C${mid} ${y1} ${mid} ${y2} ${x2} ${y2}`} />
      {flow === "cut" && <Cross x={mid} y={(y1 + y2) / 2} />}
    </g>
  );
}

function Down({ x, y, flow }: { x: number; y: number; flow: Flow }) {
  return (
    <g class={"edge " + flow}>
      <path d={`M${x} ${y}v22${flow === "flows" ? "m-5 -6l5 6l5 -6" : ""}`} />
      {flow === "cut" && <Cross x={x} y={y + 11} />}
    </g>
  );
}

const Cross = ({ x, y }: { x: number; y: number }) => <path class="cross" d={`M${x - 5} ${y - 5}l10 10m0 -10l-10 10`} />;
