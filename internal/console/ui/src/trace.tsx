// Which way a packet goes: the same as `portal trace`, asked on a Service's page.
import { useEffect, useRef, useState } from "preact/hooks";
import { ask, world } from "./live";
import { go, href, type Place } from "./router";
import type { Detail, TraceAnswer } from "./types";

const parts = ["from", "to", "via", "mode"] as const;
type Asked = Record<(typeof parts)[number], string>;

const fromQuery = (query: URLSearchParams): Asked => ({ from: query.get("from") ?? "", to: query.get("to") ?? "", via: query.get("via") ?? "", mode: query.get("mode") ?? "" });

const withPort = (address: string, port: number, protocol: string) => (address.includes(":") ? `[${address}]` : address) + `:${port}` + (protocol === "TCP" ? "" : "/" + protocol);

/** targets are where packets to the Service can be sent. */
function targets(d: Detail): string[] {
  const s = d.service;
  const out: string[] = [];
  for (const p of s.ports ?? []) {
    out.push(withPort(`${s.name}.${s.ns}`, p.port, p.protocol));
    for (const ip of [...(s.ips ?? []), ...(s.lb ?? []), ...(s.external ?? [])]) if (/^[0-9a-f.:]+$/i.test(ip)) out.push(withPort(ip, p.port, p.protocol));
    if (p.nodePort) for (const n of [...world.nodes.values()].slice(0, 3)) if (n.addresses?.[0]) out.push(withPort(n.addresses[0], p.nodePort, p.protocol));
  }
  return out;
}

/** shape is what of a Service decides where its packets go. */
const shape = ({ service: s, policies, endpoints }: Detail) => JSON.stringify([s.ips, s.lb, s.external, s.cname, s.ports, policies, endpoints]);

export function Trace({ detail, place }: { detail: Detail; place: Place }) {
  const s = detail.service;
  const linked = fromQuery(place.query);
  const [asked, setAsked] = useState<Asked>(() => ({ ...linked, from: linked.from || "client", to: linked.to || (targets(detail)[0] ?? "") }));
  const [answer, setAnswer] = useState<TraceAnswer & { shape: string }>();
  const [problem, setProblem] = useState("");
  const [busy, setBusy] = useState(false);
  const turn = useRef(0);
  const frame = useRef<HTMLFormElement>(null);

  const run = (question: Asked) => {
    const mine = ++turn.current;
    const now = shape(detail);
    setBusy(true);
    const query = new URLSearchParams(Object.entries(question).filter(([, value]) => value));
    ask<TraceAnswer>("GET", `trace/${encodeURIComponent(s.ns)}?${query}`)
      .then(
        (found) => mine === turn.current && (setAnswer({ ...found, shape: now }), setProblem("")),
        (error: Error) => mine === turn.current && (setAnswer(undefined), setProblem(error.message)),
      )
      .finally(() => mine === turn.current && setBusy(false));
  };
  useEffect(() => {
    if (!linked.from || !linked.to) return;
    run(linked);
    frame.current?.closest(".card")?.scrollIntoView({ block: "start" });
  }, []);
  const submit = (e: Event) => {
    e.preventDefault();
    const next = new URLSearchParams(place.query);
    for (const part of parts) asked[part] ? next.set(part, asked[part]) : next.delete(part);
    go(href(["services", s.ns, s.name], next), true);
    run(asked);
  };
  const set = (part: keyof Asked) => (e: { currentTarget: { value: string } }) => setAsked({ ...asked, [part]: e.currentTarget.value });
  const nodes = [...world.nodes.keys()].sort();
  return (
    <>
      <form class="trace" onSubmit={submit} ref={frame}>
        <label>
          From <input name="from" list="trace-from" value={asked.from} required placeholder="Pod, node, client or address" onInput={set("from")} autocomplete="off" />
        </label>
        <label>
          To <input name="to" list="trace-to" value={asked.to} required placeholder="address:port or name:port" onInput={set("to")} autocomplete="off" />
        </label>
        <label>
          Via{" "}
          <select name="via" value={asked.via} onChange={set("via")}>
            <option value="">any node</option>
            {nodes.map((n) => (
              <option key={n}>{n}</option>
            ))}
          </select>
        </label>
        <label>
          Proxy mode{" "}
          <select name="mode" value={asked.mode} onChange={set("mode")}>
            <option value="">what runs</option>
            {["nftables", "iptables", "ipvs", "userspace"].map((m) => (
              <option key={m}>{m}</option>
            ))}
          </select>
        </label>
        <button class="primary" disabled={busy}>
          Trace
        </button>
        <datalist id="trace-from">
          <option value="client" />
          {nodes.slice(0, 50).map((n) => (
            <option key={n} value={n} />
          ))}
          {detail.pods?.slice(0, 50).map((p) => (
            <option key={p.name} value={`${s.ns}/${p.name}`} />
          ))}
        </datalist>
        <datalist id="trace-to">
          {targets(detail).map((t) => (
            <option key={t} value={t} />
          ))}
        </datalist>
      </form>
      <p class="error" role="alert">
        {problem}
      </p>
      <div role="status">
        {answer && answer.shape !== shape(detail) && (
          <p class="banner note old">
            The Service has changed since this was worked out.{" "}
            <button type="button" disabled={busy} onClick={() => run(asked)}>
              Trace again
            </button>
          </p>
        )}
        {answer && <Answer answer={answer} />}
      </div>
      {!answer && !problem && <p class="hint">From a Pod, a node, an address, or "client" for somebody outside. It is worked out from what you may see; no packet is sent.</p>}
    </>
  );
}

function Answer({ answer }: { answer: TraceAnswer }) {
  const groups: { node: string; steps: { kind: string; text: string }[] }[] = [];
  for (const step of answer.steps ?? []) {
    const last = groups.at(-1);
    if (last && last.node === (step.node ?? "")) last.steps.push(step);
    else groups.push({ node: step.node ?? "", steps: [step] });
  }
  return (
    <div class={"way " + (answer.good ? "ok" : "broken")}>
      <h3>
        <span class="ending">{answer.verdict}</span> {answer.reason}
      </h3>
      <dl>
        <dt>from</dt>
        <dd>{answer.from}</dd>
        <dt>to</dt>
        <dd>{answer.to}</dd>
      </dl>
      {groups.map((group, i) => (
        <section key={i}>
          {group.node && <h4>on node {group.node}</h4>}
          <dl>
            {group.steps.map((step, j) => (
              <div key={j}>
                <dt>{step.kind}</dt>
                <dd>{step.text}</dd>
              </div>
            ))}
          </dl>
        </section>
      ))}
      {answer.ends && (
        <section>
          <h4>arrives at</h4>
          <dl>
            {answer.ends.map((end) => (
              <div key={end.text}>
                <dt>{end.odds}</dt>
                <dd>{end.text}</dd>
              </div>
            ))}
          </dl>
          {answer.more ? <p class="hint">And {answer.more} more.</p> : null}
        </section>
      )}
      {answer.assumptions && (
        <section>
          <h4>assumed</h4>
          <ul>
            {answer.assumptions.map((a) => (
              <li key={a}>{a}</li>
            ))}
          </ul>
        </section>
      )}
      <p class="hint">The same on the command line, which can also send a real packet (--live):</p>
      <pre tabIndex={0}>{answer.command}</pre>
    </div>
  );
}
