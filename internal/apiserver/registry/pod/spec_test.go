package pod

import (
	"encoding/json"
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"
)

// Each case is a Pod's spec in JSON, its containers left out where they are not the matter, and what is wrong with it.
func TestSpec(t *testing.T) {
	const container = `"containers":[{"name":"c","image":"i"`
	for name, c := range map[string]struct {
		spec   string
		causes []string
	}{
		"sound":             {container + `}]`, nil},
		"no image":          {`"containers":[{"name":"c"}]`, []string{"spec.containers[0].image FieldValueRequired"}},
		"padded image":      {`"containers":[{"name":"c","image":" i"}]`, []string{"spec.containers[0].image FieldValueInvalid"}},
		"same name":         {container + `},{"name":"c","image":"i"}],"initContainers":[{"name":"c","image":"i"}]`, []string{"spec.containers[1].name FieldValueDuplicate", "spec.initContainers[0].name FieldValueDuplicate"}},
		"host port":         {container + `,"ports":[{"containerPort":1,"hostPort":9}]},{"name":"d","image":"i","ports":[{"containerPort":2,"hostPort":9}]}]`, []string{"spec.containers[1].ports[0].hostPort FieldValueDuplicate"}},
		"init host ports":   {container + `}],"initContainers":[{"name":"x","image":"i"},{"name":"y","image":"i","ports":[{"containerPort":1,"hostPort":9},{"containerPort":2,"hostPort":9}]}]`, []string{"spec.initContainers[0].ports[1].hostPort FieldValueDuplicate"}},
		"host network":      {`"hostNetwork":true,` + container + `,"ports":[{"containerPort":80,"hostPort":81}]}]`, []string{"spec.containers[0].ports[0].hostPort FieldValueInvalid"}},
		"port":              {container + `,"ports":[{"name":"A","containerPort":0,"protocol":"X"},{"containerPort":70000}]}]`, []string{"spec.containers[0].ports[0].containerPort FieldValueRequired", "spec.containers[0].ports[0].name FieldValueInvalid", "spec.containers[0].ports[0].name FieldValueInvalid", "spec.containers[0].ports[0].protocol FieldValueNotSupported", "spec.containers[0].ports[1].containerPort FieldValueInvalid"}},
		"env":               {container + `,"env":[{"name":""},{"name":"a b"},{"name":"a=b"},{"name":"X","valueFrom":{}},{"name":"Y","value":"y","valueFrom":{"fieldRef":{"fieldPath":"metadata.name"}}}]}]`, []string{"spec.containers[0].env[0].name FieldValueRequired", "spec.containers[0].env[2].name FieldValueInvalid", "spec.containers[0].env[3].valueFrom FieldValueInvalid", "spec.containers[0].env[4].valueFrom FieldValueInvalid"}},
		"fields":            {container + `,"env":[{"name":"A","valueFrom":{"fieldRef":{"fieldPath":"metadata.labels['a']"}}},{"name":"B","valueFrom":{"fieldRef":{"fieldPath":"metadata.labels"}}},{"name":"C","valueFrom":{"fieldRef":{"fieldPath":"spec"}}}]}]`, []string{"spec.containers[0].env[1].valueFrom.fieldRef.fieldPath FieldValueNotSupported", "spec.containers[0].env[2].valueFrom.fieldRef.fieldPath FieldValueInvalid"}},
		"amounts":           {container + `,"env":[{"name":"A","valueFrom":{"resourceFieldRef":{"resource":"limits.cpu","divisor":"1k"}}},{"name":"B","valueFrom":{"resourceFieldRef":{"resource":"x"}}}]}]`, []string{"spec.containers[0].env[0].valueFrom.resourceFieldRef.divisor FieldValueInvalid", "spec.containers[0].env[1].valueFrom.resourceFieldRef.resource FieldValueNotSupported"}},
		"env from":          {container + `,"envFrom":[{},{"configMapRef":{}}]}]`, []string{"spec.containers[0].envFrom FieldValueInvalid", "spec.containers[0].envFrom[1].configMapRef.name FieldValueRequired"}},
		"env file":          {`"volumes":[{"name":"v","secret":{"secretName":"s"}}],` + container + `,"env":[{"name":"A","valueFrom":{"fileKeyRef":{"volumeName":"v","path":"p","key":"K"}}}]}]`, []string{"spec.containers[0].env[0].valueFrom.fileKeyRef.volumeName FieldValueInvalid"}},
		"probe":             {container + `,"livenessProbe":{"httpGet":{"port":0},"tcpSocket":{"port":1},"successThreshold":2,"periodSeconds":-1}}]`, []string{"spec.containers[0].livenessProbe.httpGet.port FieldValueInvalid", "spec.containers[0].livenessProbe.periodSeconds FieldValueInvalid", "spec.containers[0].livenessProbe.successThreshold FieldValueInvalid", "spec.containers[0].livenessProbe.tcpSocket FieldValueForbidden"}},
		"no probe":          {container + `,"readinessProbe":{"terminationGracePeriodSeconds":1}}]`, []string{"spec.containers[0].readinessProbe FieldValueRequired", "spec.containers[0].readinessProbe.terminationGracePeriodSeconds FieldValueInvalid"}},
		"hook":              {container + `,"lifecycle":{"preStop":{"sleep":{"seconds":31}},"postStart":{"exec":{}}}}]`, []string{"spec.containers[0].lifecycle.postStart.exec.command FieldValueRequired", "spec.containers[0].lifecycle.preStop.sleep FieldValueInvalid"}},
		"init probe":        {container + `}],"initContainers":[{"name":"x","image":"i","startupProbe":{"exec":{"command":["a"]}}},{"name":"y","image":"i","restartPolicy":"Always","startupProbe":{"exec":{"command":["a"]}}}]`, []string{"spec.initContainers[0].startupProbe FieldValueForbidden"}},
		"restart rules":     {container + `,"restartPolicyRules":[{"action":"X"}]}]`, []string{"spec.containers[0].restartPolicy FieldValueRequired", "spec.containers[0].restartPolicyRules[0].action FieldValueNotSupported", "spec.containers[0].restartPolicyRules[0].exitCodes FieldValueRequired"}},
		"resources":         {container + `,"resources":{"requests":{"cpu":"2"},"limits":{"cpu":"1","foo":"1","example.com/x":"500m"}}}]`, []string{"spec.containers[0].resources.limits[example.com/x] FieldValueInvalid", "spec.containers[0].resources.limits[foo] FieldValueInvalid", "spec.containers[0].resources.limits[foo] FieldValueInvalid", "spec.containers[0].resources.requests FieldValueInvalid", "spec.containers[0].resources.requests[example.com/x] FieldValueInvalid", "spec.containers[0].resources.requests[foo] FieldValueInvalid", "spec.containers[0].resources.requests[foo] FieldValueInvalid"}},
		"huge pages":        {container + `,"resources":{"limits":{"hugepages-2Mi":"3Mi"}}}]`, []string{"spec.containers[0].resources FieldValueForbidden", "spec.containers[0].resources.limits[hugepages-2Mi] FieldValueInvalid", "spec.containers[0].resources.requests[hugepages-2Mi] FieldValueInvalid"}},
		"Pod's resources":   {`"resources":{"requests":{"cpu":"1"},"limits":{"example.com/x":"1"}},` + container + `,"resources":{"requests":{"cpu":"2"}}}]`, []string{"spec.resources.limits[example.com/x] FieldValueNotSupported", "spec.resources.requests[cpu] FieldValueInvalid"}},
		"mounts":            {`"volumes":[{"name":"v"}],` + container + `,"volumeMounts":[{"name":"v","mountPath":"/a","subPath":"../x"},{"name":"w","mountPath":"/a"},{}]}]`, []string{"spec.containers[0].volumeMounts.subPath FieldValueInvalid", "spec.containers[0].volumeMounts[1].mountPath FieldValueInvalid", "spec.containers[0].volumeMounts[1].name FieldValueNotFound", "spec.containers[0].volumeMounts[2].mountPath FieldValueRequired", "spec.containers[0].volumeMounts[2].name FieldValueNotFound", "spec.containers[0].volumeMounts[2].name FieldValueRequired"}},
		"devices":           {`"volumes":[{"name":"v"},{"name":"p","persistentVolumeClaim":{"claimName":"c"}}],` + container + `,"volumeMounts":[{"name":"p","mountPath":"/p"}],"volumeDevices":[{"name":"v","devicePath":"/p"},{"name":"p","devicePath":"../x"}]}]`, []string{"spec.containers[0].volumeDevices[0].devicePath FieldValueInvalid", "spec.containers[0].volumeDevices[0].name FieldValueInvalid", "spec.containers[0].volumeDevices[1].devicePath FieldValueInvalid", "spec.containers[0].volumeDevices[1].name FieldValueInvalid", "spec.containers[0].volumeMounts[0].mountPath FieldValueInvalid", "spec.containers[0].volumeMounts[0].name FieldValueInvalid"}},
		"volumes":           {`"volumes":[{"name":"a","emptyDir":{},"hostPath":{"path":""}},{"name":"a"},{"name":"a"},{"name":"B","configMap":{}},{"secret":{"secretName":"s","defaultMode":512,"items":[{"key":"k","path":"..x"}]}}],` + container + `}]`, []string{"spec.volumes[0].hostPath FieldValueForbidden", "spec.volumes[2].name FieldValueDuplicate", "spec.volumes[3].configMap.name FieldValueRequired", "spec.volumes[3].name FieldValueInvalid", "spec.volumes[4].name FieldValueRequired", "spec.volumes[4].secret.defaultMode FieldValueInvalid", "spec.volumes[4].secret.items[0].path FieldValueInvalid"}},
		"projected":         {`"volumes":[{"name":"a","projected":{"sources":[{"configMap":{"name":"c","items":[{"key":"k","path":"p"}]},"secret":{"name":"s","items":[{"key":"k","path":"p"}]}},{"serviceAccountToken":{"path":"t","expirationSeconds":5}}]}}],` + container + `}]`, []string{"spec.volumes[0].projected FieldValueInvalid", "spec.volumes[0].projected.sources[0] FieldValueForbidden", "spec.volumes[0].projected.sources[1].serviceAccountToken FieldValueForbidden", "spec.volumes[0].projected.sources[1].serviceAccountToken.expirationSeconds FieldValueInvalid"}},
		"DNS none":          {`"dnsPolicy":"None",` + container + `}]`, []string{"spec.dnsConfig FieldValueRequired"}},
		"DNS":               {`"dnsPolicy":"X","dnsConfig":{"nameservers":["a","1.1.1.1","1.1.1.2","1.1.1.3"],"searches":["a_b.","A"],"options":[{}]},` + container + `}]`, []string{"spec.dnsConfig.nameservers FieldValueInvalid", "spec.dnsConfig.nameservers[0] FieldValueInvalid", "spec.dnsConfig.options[0] FieldValueRequired", "spec.dnsConfig.searches[1] FieldValueInvalid", "spec.dnsPolicy FieldValueNotSupported"}},
		"host aliases":      {`"hostAliases":[{"ip":"01.1.1.1","hostnames":["a_b"]}],` + container + `}]`, []string{"spec.hostAliases[0].hostnames[0] FieldValueInvalid", "spec.hostAliases[0].ip FieldValueInvalid"}},
		"policies":          {`"restartPolicy":"X","activeDeadlineSeconds":0,` + container + `,"imagePullPolicy":"X","terminationMessagePolicy":"X"}]`, []string{"spec.activeDeadlineSeconds FieldValueInvalid", "spec.containers[0].imagePullPolicy FieldValueNotSupported", "spec.containers[0].terminationMessagePolicy FieldValueNotSupported", "spec.restartPolicy FieldValueNotSupported"}},
		"names":             {`"nodeName":"A","hostname":"a.b","subdomain":"a.b","serviceAccountName":"A","hostnameOverride":"A","setHostnameAsFQDN":true,` + container + `}]`, []string{"spec.hostname FieldValueInvalid", "spec.hostnameOverride FieldValueForbidden", "spec.hostnameOverride FieldValueInvalid", "spec.nodeName FieldValueInvalid", "spec.serviceAccountName FieldValueInvalid", "spec.subdomain FieldValueInvalid"}},
		"tolerations":       {`"tolerations":[{},{"key":"a b","operator":"Exists","value":"v"},{"key":"k","effect":"X","tolerationSeconds":1},{"key":"k","operator":"Gt"}],` + container + `}]`, []string{"spec.tolerations[0].operator FieldValueInvalid", "spec.tolerations[1].key FieldValueInvalid", "spec.tolerations[1].operator FieldValueInvalid", "spec.tolerations[2].effect FieldValueInvalid", "spec.tolerations[2].effect FieldValueNotSupported", "spec.tolerations[3].operator FieldValueNotSupported"}},
		"gates":             {`"nodeName":"n","readinessGates":[{"conditionType":"a b"}],"schedulingGates":[{"name":"a"},{"name":"a"}],` + container + `}]`, []string{"spec.nodeName FieldValueForbidden", "spec.readinessGates[0].conditionType FieldValueInvalid", "spec.schedulingGates[1] FieldValueDuplicate"}},
		"node affinity":     {`"affinity":{"nodeAffinity":{"requiredDuringSchedulingIgnoredDuringExecution":{"nodeSelectorTerms":[{"matchExpressions":[{"key":"a","operator":"In"},{"key":"a","operator":"X","values":["a b"]}],"matchFields":[{"key":"spec.x","operator":"Exists"}]}]},"preferredDuringSchedulingIgnoredDuringExecution":[{"weight":0,"preference":{"matchExpressions":[{"key":"a","operator":"In","values":["a b"]}]}}]}},` + container + `}]`, []string{"spec.affinity.nodeAffinity.preferredDuringSchedulingIgnoredDuringExecution[0].weight FieldValueInvalid", "spec.affinity.nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution.nodeSelectorTerms[0].matchExpressions[0].values FieldValueRequired", "spec.affinity.nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution.nodeSelectorTerms[0].matchExpressions[1].operator FieldValueInvalid", "spec.affinity.nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution.nodeSelectorTerms[0].matchExpressions[1].values[0] FieldValueInvalid", "spec.affinity.nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution.nodeSelectorTerms[0].matchFields[0].key FieldValueInvalid", "spec.affinity.nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution.nodeSelectorTerms[0].matchFields[0].operator FieldValueInvalid"}},
		"Pod affinity":      {`"affinity":{"podAffinity":{"preferredDuringSchedulingIgnoredDuringExecution":[{"weight":101,"podAffinityTerm":{"namespaces":["A"],"matchLabelKeys":["a"],"labelSelector":{"matchExpressions":[{"key":"a","operator":"Exists"},{"key":"a","operator":"Exists"}]}}}]}},` + container + `}]`, []string{"spec.affinity.podAffinity.preferredDuringSchedulingIgnoredDuringExecution[0].podAffinityTerm.namespace FieldValueInvalid", "spec.affinity.podAffinity.preferredDuringSchedulingIgnoredDuringExecution[0].podAffinityTerm.topologyKey FieldValueInvalid", "spec.affinity.podAffinity.preferredDuringSchedulingIgnoredDuringExecution[0].podAffinityTerm.topologyKey FieldValueInvalid", "spec.affinity.podAffinity.preferredDuringSchedulingIgnoredDuringExecution[0].podAffinityTerm.topologyKey FieldValueRequired", "spec.affinity.podAffinity.preferredDuringSchedulingIgnoredDuringExecution[0].podAffinityTerm[0] FieldValueInvalid", "spec.affinity.podAffinity.preferredDuringSchedulingIgnoredDuringExecution[0].weight FieldValueInvalid"}},
		"spread":            {`"topologySpreadConstraints":[{"maxSkew":0,"topologyKey":"z","whenUnsatisfiable":"ScheduleAnyway","minDomains":1},{"maxSkew":1,"topologyKey":"z","whenUnsatisfiable":"ScheduleAnyway","nodeTaintsPolicy":"X","matchLabelKeys":["a"]}],` + container + `}]`, []string{"spec.topologySpreadConstraints[0].maxSkew FieldValueInvalid", "spec.topologySpreadConstraints[0].minDomains FieldValueInvalid", "spec.topologySpreadConstraints[0].{topologyKey, whenUnsatisfiable} FieldValueDuplicate", "spec.topologySpreadConstraints[1].matchLabelKeys FieldValueForbidden", "spec.topologySpreadConstraints[1].nodeTaintsPolicy FieldValueNotSupported"}},
		"security":          {`"hostNetwork":true,"hostUsers":false,"securityContext":{"fsGroup":-1,"sysctls":[{"name":"net.x"},{"name":"A"}],"seccompProfile":{"type":"Localhost"}},` + container + `,"securityContext":{"runAsUser":-1,"privileged":true,"allowPrivilegeEscalation":false,"seccompProfile":{"type":"X","localhostProfile":"p"},"appArmorProfile":{}}}]`, []string{"spec.containers[0].securityContext FieldValueInvalid", "spec.containers[0].securityContext.appArmorProfile.type FieldValueRequired", "spec.containers[0].securityContext.privileged FieldValueForbidden", "spec.containers[0].securityContext.runAsUser FieldValueInvalid", "spec.containers[0].securityContext.seccompProfile.localhostProfile FieldValueInvalid", "spec.containers[0].securityContext.seccompProfile.type FieldValueNotSupported", "spec.hostNetwork FieldValueForbidden", "spec.securityContext.fsGroup FieldValueInvalid", "spec.securityContext.seccompProfile.localhostProfile FieldValueRequired", "spec.securityContext.sysctls[0].name FieldValueInvalid", "spec.securityContext.sysctls[1].name FieldValueInvalid"}},
		"claims":            {`"resourceClaims":[{"name":"a","resourceClaimName":"x"},{"name":"a"}],` + container + `,"resources":{"claims":[{"name":"a","request":"r"},{"name":"a"},{"name":"b"}]}}]`, []string{"spec.containers[0].resources.claims[1] FieldValueDuplicate", "spec.containers[0].resources.claims[2] FieldValueNotFound", "spec.resourceClaims[1] FieldValueInvalid", "spec.resourceClaims[1].name FieldValueDuplicate"}},
		"ephemeral at once": {container + `}],"ephemeralContainers":[{"name":"e","image":"i"}]`, []string{"spec.ephemeralContainers FieldValueForbidden"}},
	} {
		t.Run(name, func(t *testing.T) {
			p := pod(nil)
			p.Spec = corev1.PodSpec{}
			if err := json.Unmarshal([]byte("{"+c.spec+"}"), &p.Spec); err != nil {
				t.Fatal(err)
			}
			if causes := rulesOf(t).Create(t, p); !slices.Equal(causes, c.causes) {
				t.Errorf("refused because of\n%q, want\n%q", causes, c.causes)
			}
		})
	}
}

func TestAnnotations(t *testing.T) {
	for name, c := range map[string]struct {
		annotations map[string]string
		causes      []string
	}{
		"any":         {map[string]string{"a": "b"}, nil},
		"mirror":      {map[string]string{corev1.MirrorPodAnnotationKey: "x"}, []string{"metadata.annotations[kubernetes.io/config.mirror] FieldValueInvalid"}},
		"cost":        {map[string]string{corev1.PodDeletionCost: "+5"}, []string{"metadata.annotations[controller.kubernetes.io/pod-deletion-cost] FieldValueInvalid"}},
		"low cost":    {map[string]string{corev1.PodDeletionCost: "-5"}, nil},
		"seccomp":     {map[string]string{corev1.SeccompPodAnnotationKey: "x"}, []string{"metadata.annotations.seccomp.security.alpha.kubernetes.io/pod FieldValueInvalid"}},
		"AppArmor":    {map[string]string{appArmorPrefix + "d": "x"}, []string{"metadata.annotations[" + appArmorPrefix + "d] FieldValueInvalid", "metadata.annotations[" + appArmorPrefix + "d] FieldValueInvalid"}},
		"tolerations": {map[string]string{corev1.TolerationsAnnotationKey: `[{"operator":"X"}]`}, []string{"metadata.annotations.scheduler.alpha.kubernetes.io/tolerations[0].operator FieldValueInvalid", "metadata.annotations.scheduler.alpha.kubernetes.io/tolerations[0].operator FieldValueNotSupported"}},
		"no JSON":     {map[string]string{corev1.TolerationsAnnotationKey: `x`}, []string{"metadata.annotations FieldValueInvalid"}},
	} {
		t.Run(name, func(t *testing.T) {
			p := pod(func(p *corev1.Pod) { p.Annotations = c.annotations })
			if causes := rulesOf(t).Create(t, p); !slices.Equal(causes, c.causes) {
				t.Errorf("refused because of\n%q, want\n%q", causes, c.causes)
			}
		})
	}
}

func TestProfilesMatchAnnotations(t *testing.T) {
	for said, causes := range map[string][]string{
		"runtime/default": nil, "docker/default": nil,
		"unconfined":  {"spec.securityContext.seccompProfile.type FieldValueForbidden"},
		"localhost/x": {"spec.securityContext.seccompProfile.type FieldValueForbidden"},
	} {
		p := pod(func(p *corev1.Pod) {
			p.Annotations = map[string]string{corev1.SeccompPodAnnotationKey: said}
			p.Spec.SecurityContext = &corev1.PodSecurityContext{SeccompProfile: &corev1.SeccompProfile{Type: corev1.SeccompProfileTypeRuntimeDefault}}
		})
		if got := rulesOf(t).Create(t, p); !slices.Equal(got, causes) {
			t.Errorf("%s: %q, want %q", said, got, causes)
		}
	}
}
