{{- define "kvscout.chartName" -}}
{{ .Values.nameOverride | default "kvscout" | trunc 45 | trimSuffix "-" }}
{{- end }}

{{- /* At most 45 characters: the longest suffix has 16, a name 63. */ -}}
{{- define "kvscout.name" -}}
{{- $chart := include "kvscout.chartName" . -}}
{{- $name := ternary .Release.Name (printf "%s-%s" (.Release.Name | trunc 37 | trimSuffix "-") $chart) (contains $chart .Release.Name) -}}
{{ .Values.fullnameOverride | default $name | trunc 45 | trimSuffix "-" }}
{{- end }}

{{- /* Labels of the objects, not of pods: what changes with each release of the chart would roll them. */ -}}
{{- define "kvscout.labels" -}}
{{- $own := dict "app.kubernetes.io/part-of" "kvscout" "app.kubernetes.io/managed-by" .Release.Service "app.kubernetes.io/version" .Chart.AppVersion "helm.sh/chart" (printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_") -}}
{{- toYaml (merge (include "kvscout.selector" . | fromYaml) $own .Values.commonLabels) -}}
{{- end }}

{{- define "kvscout.selector" -}}
app.kubernetes.io/name: {{ include "kvscout.chartName" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- /* What selects the pods of one service. Context: root, name. */ -}}
{{- define "kvscout.podSelector" -}}
{{ include "kvscout.selector" .root }}
app.kubernetes.io/component: {{ .name }}
{{- end }}

{{- define "kvscout.image" -}}
{{- with .Values.image -}}
{{ if .digest }}{{ printf "%s@%s" .repository .digest | quote }}{{ else }}{{ printf "%s:%s" .repository (.tag | default $.Chart.AppVersion) | quote }}{{ end }}
{{- end }}
{{- end }}

{{- define "kvscout.serviceAccount" -}}
{{ .Values.serviceAccount.name | default (ternary (include "kvscout.name" .) "default" .Values.serviceAccount.create) }}
{{- end }}

{{- define "kvscout.pool" -}}
{{ .Values.inferencePool.name | default (include "kvscout.name" .) }}
{{- end }}

{{- /* What --workers-k8s says, as a list in JSON. */ -}}
{{- define "kvscout.selections" -}}
{{- $all := .Values.workers.selections -}}
{{- if .Values.inferencePool.create }}{{ $all = append $all (printf "pool/%s" (include "kvscout.pool" .)) }}{{ end -}}
{{- toJson $all -}}
{{- end }}

{{- /* Names of the services that are there, as a list in JSON. */ -}}
{{- define "kvscout.services" -}}
{{- $all := ternary (list "gateway") (list "gateway" "indexer" "scheduler") (eq .Values.mode "embedded") -}}
{{- toJson (ternary (append $all "bridge") $all .Values.bridge.create) -}}
{{- end }}

{{- define "kvscout.picks" -}}
{{- if or .Values.inferencePool.create .Values.gateway.endpointPicker.enabled }}yes{{ end -}}
{{- end }}

{{- /* Wrong values end the rendering with a sentence. */ -}}
{{- define "kvscout.check" -}}
{{- if and (not .Values.auth.secret) (not .Values.auth.allowAnonymous) }}
{{- fail "auth.secret: name a secret with tokens.yaml and token, or set auth.allowAnonymous on a network where everybody may do everything" }}
{{- end }}
{{- if and .Values.auth.secret .Values.auth.allowAnonymous }}
{{- fail "auth: either secret or allowAnonymous" }}
{{- end }}
{{- if and .Values.auth.metrics (not .Values.auth.secret) }}
{{- fail "auth.metrics needs auth.secret: there are no tokens that Prometheus could present" }}
{{- end }}
{{- if and .Values.inferencePool.create (not .Values.inferencePool.matchLabels) }}
{{- fail "inferencePool.matchLabels: an InferencePool needs the labels of its pods" }}
{{- end }}
{{- if and .Values.gateway.endpointPicker.plaintext (not (include "kvscout.picks" .)) }}
{{- fail "gateway.endpointPicker.plaintext needs gateway.endpointPicker.enabled or inferencePool.create" }}
{{- end }}
{{- if and .Values.tls.clientCertificates (not .Values.tls.secret) }}
{{- fail "tls.clientCertificates needs tls.secret" }}
{{- end }}
{{- if and .Values.nats.tls (not .Values.nats.secret) }}
{{- fail "nats.tls needs nats.secret: a secret with the key ca.crt" }}
{{- end }}
{{- if and .Values.nats.secret (not .Values.nats.servers) }}
{{- fail "nats.secret needs nats.servers" }}
{{- end }}
{{- if eq .Values.mode "embedded" }}
{{- $several := ternary (gt (int .Values.gateway.autoscaling.maxReplicas) 1) (gt (int .Values.gateway.replicas) 1) .Values.gateway.autoscaling.enabled }}
{{- if and $several (not .Values.nats.servers) }}
{{- fail "mode: embedded with several gateway.replicas needs nats.servers: each has a scheduler of its own, and they share their bookings over NATS" }}
{{- end }}
{{- if or .Values.indexer.args .Values.scheduler.args }}
{{- fail "indexer.args, scheduler.args: with mode embedded all flags belong into gateway.args" }}
{{- end }}
{{- end }}
{{- if .Values.bridge.create }}
{{- if not .Values.nats.servers }}
{{- fail "bridge.create needs nats.servers: a bridge brings events to NATS" }}
{{- end }}
{{- if not .Values.bridge.workers }}
{{- fail "bridge.workers: name the engines whose events the bridge reads" }}
{{- end }}
{{- end }}
{{- if and .Values.networkPolicy.egress.create (not .Values.networkPolicy.egress.to) }}
{{- fail "networkPolicy.egress.to: name the engines, and NATS and the Kubernetes API where they are used, or nothing can be reached" }}
{{- end }}
{{- if and .Values.ingress.create (not .Values.ingress.hosts) }}
{{- fail "ingress.hosts: name a host at least" }}
{{- end }}
{{- if and .Values.httpRoute.create (not .Values.httpRoute.parentRefs) }}
{{- fail "httpRoute.parentRefs: name the Gateway that the route is for" }}
{{- end }}
{{- range $name := list "gateway" "indexer" }}
{{- $of := index $.Values $name }}
{{- if $of.autoscaling.enabled }}
{{- if lt (int $of.autoscaling.maxReplicas) (int $of.autoscaling.minReplicas) }}
{{- fail (printf "%s.autoscaling: maxReplicas is less than minReplicas" $name) }}
{{- end }}
{{- if not (dig "requests" "cpu" "" $of.resources) }}
{{- fail (printf "%s.autoscaling needs %s.resources.requests.cpu, of which it is a percentage" $name $name) }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
