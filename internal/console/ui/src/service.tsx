import { useEffect, useState } from "preact/hooks";
import { Chain } from "./chain";
import { flow, rate, size, useFlow } from "./flow";
import { ago, count, useNow } from "./format";
import { Stream } from "./live";
import { HealthIcon } from "./overview";
import { Traffic } from "./plots";
import { href, Link, type Place } from "./router";
import { Timeline } from "./timeline";
import { Trace } from "./trace";
import type { Detail, Endpoint, Finding, Pod, ServiceTraffic } from "./types";

const word = (e: Endpoint) => (e.ready ? "ready" : e.terminating ? "terminating" : "not ready");

export function ServicePage({ namespace, name, place }: { namespace: string; name: string; place: Place }) {
  const [detail, setDetail] = useState<Detail>();
  const [last, setLast] = useState<Detail>(); // while it existed

  useEffect(() => {
    const stream = new Stream(
      () => `stream/services/${encodeURIComponent(namespace)}/${encodeURIComponent(name)}`,
      {
        detail: (data) => {
          const next = data as Detail;
          if (next.found) setLast(next);
          setDetail(next);
        },
        traffic: (data) => flow.takeOne(`${namespace}/${name}`, data as ServiceTraffic),
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
  return <Content detail={shown} gone={!detail.found} timeline={detail} place={place} />;
}

/** Content shows a Service as it is, or was: timeline is always the newest. */
function Content({ detail, gone, timeline, place }: { detail: Detail; gone: boolean; timeline: Detail; place: Place }) {
  const s = detail.service;
  const now = useNow(1000);
  const wrong = detail.findings?.some((f) => f.severity !== "notice");
  const health = gone ? "broken" : s.health === "ok" && wrong ? "warning" : s.health;
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
            {!gone && s.health === "ok" && wrong ? " But something else is wrong:" : ""}
          </p>
        </div>
      </section>
      {detail.findings?.length ? <Findings findings={detail.findings} /> : null}
      {detail.unexplained && <p class="banner note">What portal explain says is not shown: {detail.unexplained}.</p>}
      <section class="card">
        <h2>From the name to the node</h2>
        <Chain detail={detail} />
      </section>
      {s.type !== "ExternalName" && (
        <section class="card">
          <h2>Traffic</h2>
          <Traffic name={`${s.ns}/${s.name}`} />
        </section>
      )}
      <section class="card">
        <h2>Endpoints</h2>
        <Endpoints detail={detail} />
      </section>
      <section class="card">
        <h2>Which way a packet goes</h2>
        <Trace detail={detail} place={place} />
      </section>
      <div class="columns">
        <section class="card">
          <h2>What happened</h2>
          <Timeline detail={timeline} now={now} />
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
  useFlow();
  const counted = flow.last && !flow.last.missing;
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
                {counted && <th class="n">New/s</th>}
                {counted && <th class="n">Open</th>}
                {counted && flow.last!.bytes && <th class="n">Bytes/s</th>}
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
                  {counted && <td class="n">{rate(flow.endpoints[e.address]?.new ?? 0)}</td>}
                  {counted && <td class="n">{flow.endpoints[e.address]?.open ?? 0}</td>}
                  {counted && flow.last!.bytes && <td class="n">{size(flow.endpoints[e.address]?.bytes ?? 0)}</td>}
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
                  {counted && <td colSpan={flow.last!.bytes ? 3 : 2} />}
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
