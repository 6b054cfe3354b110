package apiserver

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/runtime/serializer"
	auditapi "k8s.io/apiserver/pkg/apis/audit"
	auditv1 "k8s.io/apiserver/pkg/apis/audit/v1"
	auditvalidation "k8s.io/apiserver/pkg/apis/audit/validation"
	"k8s.io/apiserver/pkg/audit"
	genericserver "k8s.io/apiserver/pkg/server"
	serveroptions "k8s.io/apiserver/pkg/server/options"
	"k8s.io/apiserver/pkg/util/webhook"
	auditlog "k8s.io/apiserver/plugin/pkg/audit/log"

	"portal/internal/configfile"
)

// AuditOptions say which requests are written down, and where: Kubernetes' own, with its own plugins.
type AuditOptions struct{ *serveroptions.AuditOptions }

// DefaultAuditOptions write nothing down.
func DefaultAuditOptions() AuditOptions { return AuditOptions{serveroptions.NewAuditOptions()} }

const (
	policyFlag     = "--audit-policy-file"
	auditLogFlag   = "--audit-log-path"
	auditHookFlag  = "--audit-webhook-config-file"
	auditLogPlugin = "log"
	hookPlugin     = "webhook"
)

// validate says what is wrong with the options, naming the flags and, in the policy, the line.
func (o AuditOptions) validate() error {
	if o.AuditOptions == nil {
		return nil
	}
	sink := o.LogOptions.Path != "" || o.WebhookOptions.ConfigFile != ""
	switch {
	case o.PolicyFile == "" && !sink:
		return nil
	case o.PolicyFile == "" && o.LogOptions.Path != "":
		return fmt.Errorf("%s: needs %s, which says what is logged; without it nothing would be", auditLogFlag, policyFlag)
	case o.PolicyFile == "":
		return fmt.Errorf("%s: needs %s, which says what is sent; without it nothing would be", auditHookFlag, policyFlag)
	case !sink:
		return fmt.Errorf("%s: needs %s or %s, for the events to go to", policyFlag, auditLogFlag, auditHookFlag)
	}
	return errors.Join(checkPolicy(o.PolicyFile), o.validateLog(), o.validateWebhook())
}

func (o AuditOptions) validateLog() error {
	log := o.LogOptions
	if log.Path == "" {
		return nil
	}
	var errs []error
	for _, limit := range []struct {
		flag  string
		value int
	}{{"maxage", log.MaxAge}, {"maxbackup", log.MaxBackups}, {"maxsize", log.MaxSize}} {
		if limit.value < 0 {
			errs = append(errs, fmt.Errorf("--audit-log-%s %d: must not be negative", limit.flag, limit.value))
		}
	}
	if !slices.Contains(auditlog.AllowedFormats, log.Format) {
		errs = append(errs, fmt.Errorf("--audit-log-format %q: must be %s", log.Format, strings.Join(auditlog.AllowedFormats, " or ")))
	}
	return errors.Join(append(errs, validateSink(auditLogPlugin, log.BatchOptions, log.TruncateOptions, log.GroupVersionString))...)
}

func (o AuditOptions) validateWebhook() error {
	hook := o.WebhookOptions
	if hook.ConfigFile == "" {
		return nil
	}
	var errs []error
	if _, err := webhook.LoadKubeconfig(hook.ConfigFile, nil); err != nil {
		errs = append(errs, fmt.Errorf("%s %s: must be a kubeconfig whose current context has the webhook's URL as its server: %w", auditHookFlag, hook.ConfigFile, err))
	}
	return errors.Join(append(errs, validateSink(hookPlugin, hook.BatchOptions, hook.TruncateOptions, hook.GroupVersionString))...)
}

// validateSink checks what the log and the webhook have in common.
func validateSink(plugin string, batch serveroptions.AuditBatchOptions, truncate serveroptions.AuditTruncateOptions, version string) error {
	flag := "--audit-" + plugin
	var errs []error
	refuse := func(wrong bool, name string, given any, must string) {
		if wrong {
			errs = append(errs, fmt.Errorf("%s-%s %v: must be %s", flag, name, given, must))
		}
	}
	refuse(!slices.Contains(serveroptions.AllowedModes, batch.Mode), "mode", batch.Mode, "one of "+strings.Join(serveroptions.AllowedModes, ", "))
	if config := batch.BatchConfig; batch.Mode == serveroptions.ModeBatch {
		refuse(config.BufferSize <= 0, "batch-buffer-size", config.BufferSize, "at least 1")
		refuse(config.MaxBatchSize <= 0, "batch-max-size", config.MaxBatchSize, "at least 1")
		refuse(config.ThrottleEnable && config.ThrottleQPS <= 0, "batch-throttle-qps", config.ThrottleQPS, "more than 0")
		refuse(config.ThrottleEnable && config.ThrottleBurst <= 0, "batch-throttle-burst", config.ThrottleBurst, "at least 1")
	}
	size := truncate.TruncateConfig
	refuse(size.MaxEventSize <= 0, "truncate-max-event-size", size.MaxEventSize, "at least 1")
	refuse(size.MaxBatchSize < size.MaxEventSize, "truncate-max-batch-size", size.MaxBatchSize, "at least the largest event's size")
	refuse(version != auditv1.SchemeGroupVersion.String(), "version", version, auditv1.SchemeGroupVersion.String())
	return errors.Join(errs...)
}

// checkPolicy reads a policy strictly: a mistyped field would leave requests out of the log that somebody wanted there.
func checkPolicy(file string) error {
	data, err := os.ReadFile(file)
	if err != nil {
		return fmt.Errorf("%s: %w", policyFlag, err)
	}
	wrong := func(err error) error { return configfile.Mistakes(policyFlag+" "+file, data, err) }
	object, kind, err := serializer.NewCodecFactory(audit.Scheme, serializer.EnableStrict).UniversalDecoder().Decode(data, nil, nil)
	if err != nil {
		return wrong(err)
	}
	policy, ok := object.(*auditapi.Policy)
	if !ok || kind.GroupVersion() != auditv1.SchemeGroupVersion {
		return wrong(fmt.Errorf("it is a %s of %s, and must be a Policy of %s", kind.Kind, kind.GroupVersion(), auditv1.SchemeGroupVersion))
	}
	if errs := auditvalidation.ValidatePolicy(policy); len(errs) > 0 {
		return wrong(errs.ToAggregate())
	}
	if len(policy.Rules) == 0 {
		return wrong(errors.New("rules: at least one is needed"))
	}
	return nil
}

// applyTo has the server write down what the policy asks for.
func (o AuditOptions) applyTo(config *genericserver.Config) error {
	if o.AuditOptions == nil || o.PolicyFile == "" {
		return nil
	}
	if err := o.ApplyTo(config); err != nil {
		return fmt.Errorf("audit log (%s, %s, %s): %w", policyFlag, auditLogFlag, auditHookFlag, err)
	}
	return nil
}
