package main

import (
	"strings"

	"github.com/spf13/pflag"

	"portal/internal/apiserver"
)

// addEncryptionFlags adds those of encryption at rest.
func addEncryptionFlags(f *pflag.FlagSet, o *apiserver.EncryptionOptions) {
	f.StringVar(&o.ConfigFile, "encryption-provider-config", o.ConfigFile,
		"file of keys to encrypt objects with in etcd, an EncryptionConfiguration of apiserver.config.k8s.io/v1")
	f.BoolVar(&o.Reload, "encryption-provider-config-automatic-reload", o.Reload, "take changes of that file while the server runs")
}

// auditUsage is what the flags of the audit log mean, by what follows --audit-; WHERE is log and webhook. Names and meaning
// are kube-apiserver's.
var auditUsage = map[string]string{
	"policy-file": "file that says which requests are audited and how much of them, a Policy of audit.k8s.io/v1",

	"log-path":      "file to write audit events to, one a line; - is standard output",
	"log-maxage":    "days that rotated audit logs are kept; 0 is for ever",
	"log-maxbackup": "rotated audit logs that are kept; 0 is all",
	"log-maxsize":   "megabytes at which the audit log is rotated; 0 is never",
	"log-format":    "format of the audit log: json, or legacy for a line of text",
	"log-compress":  "compress rotated audit logs with gzip",

	"webhook-config-file":           "kubeconfig of the webhook that audit events are sent to",
	"webhook-initial-backoff":       "pause before the first retry of events that the webhook did not take",
	"webhook-batch-initial-backoff": "as --audit-webhook-initial-backoff",

	"WHERE-mode": "when audit events are written: batch (later, in batches), blocking (before the answer), blocking-strict " +
		"(also refuses requests that can't be audited when they come in)",
	"WHERE-version":                 "API version of audit events",
	"WHERE-batch-buffer-size":       "mode batch: events that wait at most; further ones are lost",
	"WHERE-batch-max-size":          "mode batch: events in a batch at most",
	"WHERE-batch-max-wait":          "mode batch: time after which a batch that is not full is written",
	"WHERE-batch-throttle-enable":   "mode batch: limit the rate of batches",
	"WHERE-batch-throttle-qps":      "mode batch: batches a second on average",
	"WHERE-batch-throttle-burst":    "mode batch: batches at once, if there were none for a while",
	"WHERE-truncate-enabled":        "shorten events and split batches that are too large",
	"WHERE-truncate-max-batch-size": "bytes of a batch at most",
	"WHERE-truncate-max-event-size": "bytes of an event at most; bodies are left out first, then the event is dropped",
}

// addAuditFlags adds those of the audit log, which k8s.io/apiserver defines.
func addAuditFlags(f *pflag.FlagSet, o apiserver.AuditOptions) {
	theirs := pflag.NewFlagSet("", pflag.ContinueOnError)
	o.AddFlags(theirs)
	theirs.VisitAll(func(flag *pflag.Flag) {
		name := strings.TrimPrefix(flag.Name, "audit-")
		usage, ok := auditUsage[name]
		if !ok {
			_, rest, _ := strings.Cut(name, "-")
			usage, ok = auditUsage["WHERE-"+rest]
		}
		if ok {
			flag.Usage = usage
		}
		f.AddFlag(flag)
	})
}
