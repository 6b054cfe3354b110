import { useEffect, useRef, useState } from "preact/hooks";
import { Chain } from "./chain";
import { ago, count, healthName, useNow } from "./format";
import { Stream } from "./live";
import { HealthIcon } from "./overview";
import { href, Link } from "./router";
import type { Detail, Endpoint, Finding, Pod } from "./types";

interface Moment {
  time: number;
  what: string;
  kind: "good" | "bad" | "neutral";
}

const maxMoments = 200;

const word = (e: Endpoint) => (e.ready ? "ready" : e.terminating ? "terminating" : "not ready");
const named = (e: Endpoint) => (e.pod ? `${e.address} (${e.pod})` : e.address);

/** compare says what became of the endpoints between two moments. */
function compare(before: Endpoint[], after: Endpoint[]): Omit<Moment, "time">[] {
  const old = new Map(before.map((e) => [e.address, e]));
  const out: Omit<Moment, "time">[] = [];
  for (const e of after) {
    const was = old.get(e.address);
    old.delete(e.address);
    if (!was) out.push({ what: `${named(e)} was added, ${word(e)}`, kind: e.ready ? "good" : "neutral" });
    else if (word(was) !== word(e)) out.push({ what: `${named(e)} is ${word(e)} (was ${word(was)})`, kind: e.ready ? "good" : "bad" });
  }
  for (const e of old.values()) out.push({ what: `${named(e)} was removed (was ${word(e)})`, kind: e.ready ? "bad" : "neutral" });
  if (out.length > 12) {
    const bad = out.filter((m) => m.kind === "bad").length;
    return [{ what: `${count(out.length, "endpoint")} changed at once: ${after.filter((e) => e.ready).length} are ready now`, kind: bad ? "bad" : "good" }];
  }
  return out;
}

export function ServicePage({ namespace, name }: { namespace: string; name: string }) {
  const [detail, setDetail] = useState<Detail>();
  const [last, setLast] = useState<Detail>(); // while it existed
  const [moments, setMoments] = useState<Moment[]>([]);
  const opened = useRef(Date.now());
  const previous = useRef<Detail | undefined>(undefined);

  useEffect(() => {
    const stream = new Stream(
      () => `stream/services/${encodeURIComponent(namespace)}/${encodeURIComponent(name)}`,
      "detail",
      (data) => {
        const next = data as Detail;
        const before = previous.current;
        const found: Moment[] = [];
        const note = (m: Omit<Moment, "time">) => found.push({ ...m, time: Date.now() });
        if (before?.found && next.found) {
          for (const change of compare(before.endpoints ?? [], next.endpoints ?? [])) note(change);
          if (before.service.health !== next.service.health)
            note({ what: `The Service is ${healthName[next.service.health]}${next.service.problem ? ": " + next.service.problem : ""}`, kind: next.service.health === "ok" ? "good" : "bad" });
        } else if (before && before.found !== next.found) note({ what: next.found ? "The Service was created" : "The Service was deleted", kind: next.found ? "good" : "bad" });
        previous.current = next;
        if (found.length) setMoments((old) => [...found.reverse(), ...old].slice(0, maxMoments));
        if (next.found) setLast(next);
        setDetail(next);
      },
      () => {},
      () => {}, // the overview's stream says so too
    );
    return () => stream.close();
  }, []);
  useEffect(() => void (document.title = `${name} · ${namespace} · Portal`), []);

  if (!detail)
    return (
      <p class="empty" role="status">
        Loading …
      </p>
    );
  const shown = detail.found ? detail : last;
  if (!shown)
    return (
      <section class="empty">
        <h1>
          {namespace}/{name}
        </h1>
        <p>{detail.status.synced ? "There is no such Service, or you may not see it." : "Loading …"}</p>
        <p>
          <Link to={href([])}>All Services</Link>
        </p>
      </section>
    );
  return <Content detail={shown} gone={!detail.found} moments={moments} opened={opened.current} />;
}

function Content({ detail, gone, moments, opened }: { detail: Detail; gone: boolean; moments: Moment[]; opened: number }) {
  const s = detail.service;
  const now = useNow(1000);
  const health = gone ? "broken" : s.health;
  return (
    <>
      <div class="crumbs">
        <Link to={href([])}>Services</Link> / <Link to={href([], new URLSearchParams({ ns: s.ns }))}>{s.ns}</Link>
      </div>
      <section class={"verdict " + health}>
        <HealthIcon health={health} size={30} />
        <div>
          <h1>{s.name}</h1>
          <p role="status" id="verdict">
            {gone ? "This Service was deleted." : (sentence(s.problem) ?? (s.type === "ExternalName" ? `Leads to ${s.cname}.` : `${count(s.ready, "endpoint")} ready${s.zones?.length ? ` in ${count(s.zones.length, "zone")}` : ""}.`))}
          </p>
        </div>
      </section>
      {detail.findings?.length ? <Findings findings={detail.findings} /> : null}
      <section class="card">
        <h2>From the name to the node</h2>
        <Chain detail={detail} />
      </section>
      <div class="columns">
        <section class="card wide">
          <h2>Endpoints</h2>
          <Endpoints detail={detail} />
        </section>
        <section class="card">
          <h2>Since this page was opened</h2>
          <ol class="timeline">
            {moments.map((m, i) => (
              <li key={moments.length - i} class={m.kind}>
                <time>{new Date(m.time).toLocaleTimeString("en-GB")}</time> {m.what}
              </li>
            ))}
            <li class="neutral">
              <time>{new Date(opened).toLocaleTimeString("en-GB")}</time> The page was opened
            </li>
          </ol>
        </section>
        <section class="card">
          <h2>Events</h2>
          {detail.hidden?.includes("Events") ? (
            <p class="hint">You may not see Events of this namespace.</p>
          ) : detail.events?.length ? (
            <ol class="timeline">
              {detail.events.map((e) => (
                <li key={e.reason + e.message + e.from} class={e.type === "Warning" ? "bad" : "neutral"}>
                  <time>{ago(e.last, now)} ago</time> <b>{e.reason}</b> {e.message} {e.count > 1 && <small>({e.count} times)</small>}
                </li>
              ))}
            </ol>
          ) : (
            <p class="hint">There are none about this Service.</p>
          )}
        </section>
        <section class="card">
          <h2>Settings</h2>
          <dl>
            <dt>Type</dt>
            <dd>{s.type + (detail.headless ? ", headless" : "")}</dd>
            <dt>Selector</dt>
            <dd>{detail.selector ? <code>{detail.selector}</code> : "none"}</dd>
            <dt>Ports</dt>
            <dd>
              {s.ports?.map((p) => (
                <div key={p.protocol + p.port}>
                  {p.name && p.name + " "}
                  {p.port}/{p.protocol} → {p.target}
                  {p.nodePort ? `, node port ${p.nodePort}` : ""}
                </div>
              )) ?? "none"}
            </dd>
            {detail.policies?.map((p) => (
              <>
                <dt>{p.name}</dt>
                <dd>
                  {p.value}: {p.means}
                </dd>
              </>
            ))}
            <dt>Created</dt>
            <dd>{ago(s.created, now)} ago</dd>
          </dl>
        </section>
      </div>
    </>
  );
}

/** shownFindings is how many come before the picture; the others are a click away. */
const shownFindings = 2;

/** Findings are what `portal explain` says of the Service, the worst first. */
function Findings({ findings }: { findings: Finding[] }) {
  const wrong = findings.some((f) => f.severity !== "notice");
  const more = findings.slice(shownFindings);
  return (
    <section class="card">
      <h2>{wrong ? "What is wrong" : "Worth knowing"}</h2>
      {findings.slice(0, shownFindings).map((f) => (
        <OneFinding key={f.verdict} finding={f} />
      ))}
      {more.length > 0 && (
        <details>
          <summary>{count(more.length, "more finding")}</summary>
          {more.map((f) => (
            <OneFinding key={f.verdict} finding={f} />
          ))}
        </details>
      )}
    </section>
  );
}

function OneFinding({ finding }: { finding: Finding }) {
  return (
    <article class={"finding " + finding.severity}>
      <h3>{finding.verdict}</h3>
      {finding.evidence?.length ? (
        <ul>
          {finding.evidence.map((e) => (
            <li key={e}>{e}</li>
          ))}
        </ul>
      ) : null}
      {finding.fix?.length ? (
        <>
          <p class="hint">What to type:</p>
          <pre tabIndex={0}>{finding.fix.join("\n")}</pre>
        </>
      ) : null}
    </article>
  );
}

const sentence = (problem: string | undefined) => problem && problem.charAt(0).toUpperCase() + problem.slice(1) + ".";

function Endpoints({ detail }: { detail: Detail }) {
  const endpoints = detail.endpoints ?? [];
  const pods = new Map((detail.pods ?? []).map((p) => [p.name, p]));
  const members = new Set(endpoints.map((e) => e.pod));
  const others = (detail.pods ?? []).filter((p) => !members.has(p.name));
  if (detail.service.type === "ExternalName") return <p class="hint">DNS answers with the name {detail.service.cname}; there is nothing behind it here.</p>;
  return (
    <>
      {endpoints.length === 0 && others.length === 0 ? (
        <p class="hint">{detail.hidden?.includes("Pods") || !detail.selector ? "There are none." : `There are none, and no Pod in ${detail.service.ns} matches ${detail.selector}.`}</p>
      ) : (
        <div class="scroll" tabIndex={0} role="region" aria-label="Endpoints">
          <table>
            <thead>
              <tr>
                <th>State</th>
                <th>Address</th>
                <th>Pod</th>
                <th>Node</th>
                <th>Zone</th>
              </tr>
            </thead>
            <tbody>
              {endpoints.map((e) => (
                <tr key={e.address}>
                  <td class={e.ready ? "good" : e.terminating ? "dim" : "bad"}>
                    {word(e)}
                    <Reason pod={e.ready ? undefined : pods.get(e.pod ?? "")} />
                  </td>
                  <td>
                    <code>{e.address}</code> <small>{e.ports?.join(" ")}</small>
                  </td>
                  <td>{e.pod ?? "–"}</td>
                  <td>{e.node ?? "–"}</td>
                  <td>{e.zone ?? "–"}</td>
                </tr>
              ))}
              {others.map((p) => (
                <tr key={p.name}>
                  <td class="bad">
                    no endpoint
                    <Reason pod={p} />
                  </td>
                  <td>{p.ip ? <code>{p.ip}</code> : "–"}</td>
                  <td>{p.name}</td>
                  <td>{p.node ?? "–"}</td>
                  <td>–</td>
                </tr>
              ))}
            </tbody>
          </table>
        </div>
      )}
      {detail.more ? <p class="hint">And {detail.more} more.</p> : null}
    </>
  );
}

function Reason({ pod }: { pod: Pod | undefined }) {
  if (!pod) return null;
  const why = pod.reason || (pod.phase !== "Running" ? pod.phase : "");
  return why ? <small class="reason">{why}</small> : null;
}
