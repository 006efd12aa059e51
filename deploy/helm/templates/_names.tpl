{{- define "kvscout.name" -}}
{{- if contains "kvscout" .Release.Name }}{{ .Release.Name | trunc 45 | trimSuffix "-" }}{{ else }}{{ printf "%s-kvscout" (.Release.Name | trunc 37 | trimSuffix "-") }}{{ end }}
{{- end }}

{{- define "kvscout.labels" -}}
app.kubernetes.io/part-of: kvscout
app.kubernetes.io/managed-by: {{ .Release.Service }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{ include "kvscout.selector" . }}
{{- end }}

{{- define "kvscout.selector" -}}
app.kubernetes.io/name: kvscout
app.kubernetes.io/instance: {{ .Release.Name }}
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
{{- if and .Values.inferencePool.create (not .Values.inferencePool.matchLabels) }}
{{- fail "inferencePool.matchLabels: an InferencePool needs the labels of its pods" }}
{{- end }}
{{- if and .Values.tls.clientCertificates (not .Values.tls.secret) }}
{{- fail "tls.clientCertificates needs tls.secret" }}
{{- end }}
{{- end }}
