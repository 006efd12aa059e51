{{- /* Flags and volumes that every service has. Context: root, name (of the service), of (its values), registers (who brings
its own workers, and selects none). */ -}}
{{- define "kvscout.flags" -}}
- --host=0.0.0.0
- --port={{ .of.grpcPort }}
- --metrics-port={{ .of.metricsPort }}
- --grace-seconds={{ .of.graceSeconds }}
{{- /* Until its removal from the Service, and NOT_SERVING, have come round. */}}
- --shutdown-delay-seconds=5
- --log-level={{ .root.Values.logging.level }}
- --log-format={{ .root.Values.logging.format }}
{{- if .of.maxConnectionAgeSeconds }}
- --max-connection-age-seconds={{ .of.maxConnectionAgeSeconds }}
{{- end }}
{{- if not .registers }}
{{- range fromJsonArray (include "kvscout.selections" .root) }}
- {{ printf "--workers-k8s=%s" . | quote }}
{{- end }}
{{- end }}
{{- with .root.Values.auth }}
{{- if .secret }}
- --auth-tokens=/etc/kvscout/auth/tokens.yaml
{{- if .metrics }}
- --metrics-auth
{{- end }}
{{- else }}
- --allow-anonymous
{{- end }}
{{- end }}
{{- with .root.Values.tls }}
{{- if .secret }}
- --tls-cert=/etc/kvscout/tls/tls.crt
- --tls-key=/etc/kvscout/tls/tls.key
{{- if .clientCertificates }}
- --tls-client-ca=/etc/kvscout/tls/ca.crt
{{- end }}
{{- end }}
{{- end }}
{{- with .root.Values.nats }}
{{- range .servers }}
- {{ printf "--nats-server=%s" . | quote }}
{{- end }}
{{- if .servers }}
- --namespace={{ .namespace }}
- --nats-replicas={{ .replicas }}
{{- if .secret }}
- --nats-credentials=/etc/kvscout/nats/nats.creds
{{- if .tls }}
- --nats-ca=/etc/kvscout/nats/ca.crt
{{- end }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{- /* How other services are called. */ -}}
{{- define "kvscout.callerFlags" }}
{{- if .Values.auth.secret }}
- --token-file=/etc/kvscout/auth/token
{{- end }}
{{- include "kvscout.callerTls" . }}
{{- end }}

{{- define "kvscout.callerTls" }}
{{- if .Values.tls.secret }}
- --tls-ca=/etc/kvscout/tls/ca.crt
{{- if .Values.tls.clientCertificates }}
- --tls-client-cert=/etc/kvscout/tls/tls.crt
- --tls-client-key=/etc/kvscout/tls/tls.key
{{- end }}
{{- end }}
{{- end }}

{{- define "kvscout.secrets" -}}
{{- if .Values.auth.secret }}
- {name: auth, secret: {secretName: {{ .Values.auth.secret }}, defaultMode: 0440}}
{{- end }}
{{- if .Values.tls.secret }}
- {name: tls, secret: {secretName: {{ .Values.tls.secret }}, defaultMode: 0440}}
{{- end }}
{{- if and .Values.nats.servers .Values.nats.secret }}
- {name: nats, secret: {secretName: {{ .Values.nats.secret }}, defaultMode: 0440}}
{{- end }}
{{- end }}

{{- define "kvscout.mounts" -}}
{{- if .Values.auth.secret }}
- {name: auth, mountPath: /etc/kvscout/auth, readOnly: true}
{{- end }}
{{- if .Values.tls.secret }}
- {name: tls, mountPath: /etc/kvscout/tls, readOnly: true}
{{- end }}
{{- if and .Values.nats.servers .Values.nats.secret }}
- {name: nats, mountPath: /etc/kvscout/nats, readOnly: true}
{{- end }}
{{- end }}

{{- /* The kubelet's own grpc probe speaks no TLS: with TLS `kvscout health` asks, for 0.3 s of CPU, and so less often.
Context: as kvscout.service. */ -}}
{{- define "kvscout.ask" -}}
{{- if .root.Values.tls.secret }}
exec:
  command:
    - kvscout
    - health
    - localhost:{{ .of.grpcPort }}
    - --timeout=10
    - --tls-server-name={{ include "kvscout.name" .root }}-{{ .name }}
    {{- with include "kvscout.callerTls" .root | trim }}
    {{- . | nindent 4 }}
    {{- end }}
timeoutSeconds: 15
{{- else }}
grpc: {port: {{ .of.grpcPort }}}
timeoutSeconds: 5
{{- end }}
{{- end }}

{{- define "kvscout.probes" -}}
{{- $tls := not (empty .root.Values.tls.secret) -}}
# Until the workers are known, or for a few seconds: then it serves without them.
startupProbe:
  {{- include "kvscout.ask" . | trim | nindent 2 }}
  periodSeconds: {{ ternary 5 2 $tls }}
  failureThreshold: {{ ternary 24 60 $tls }}
readinessProbe:
  {{- include "kvscout.ask" . | trim | nindent 2 }}
  periodSeconds: {{ ternary 10 5 $tls }}
  failureThreshold: 2
livenessProbe:
  {{- include "kvscout.ask" . | trim | nindent 2 }}
  periodSeconds: {{ ternary 30 10 $tls }}
  failureThreshold: {{ ternary 3 6 $tls }}
{{- end }}

{{- define "kvscout.podSecurity" -}}
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
fsGroup: 65532
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "kvscout.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{- /* The Deployment of one service, its PodDisruptionBudget and its HorizontalPodAutoscaler. Context: root, name, of,
flags, ports, volumes, mounts, registers, program (its command, if it is not the service's). */ -}}
{{- define "kvscout.service" -}}
{{- $root := .root }}
{{- $of := .of }}
{{- $name := printf "%s-%s" (include "kvscout.name" $root) .name }}
{{- $reads := and (not .registers) (fromJsonArray (include "kvscout.selections" $root)) }}
{{- $scales := and (hasKey $of "autoscaling") (($of.autoscaling).enabled) }}
{{- $selector := include "kvscout.podSelector" . }}
{{- $volumes := list (include "kvscout.secrets" $root) .volumes (empty $of.volumes | ternary "" (toYaml $of.volumes)) | join "\n" | trim }}
{{- $mounts := list (include "kvscout.mounts" $root) .mounts (empty $of.volumeMounts | ternary "" (toYaml $of.volumeMounts)) | join "\n" | trim }}
apiVersion: apps/v1
kind: Deployment
metadata:
  name: {{ $name }}
  namespace: {{ $root.Release.Namespace }}
  labels:
    {{- include "kvscout.labels" $root | nindent 4 }}
    app.kubernetes.io/component: {{ .name }}
spec:
  {{- if not $scales }}
  replicas: {{ $of.replicas | default 1 }}
  {{- end }}
  selector:
    matchLabels:
      {{- $selector | nindent 6 }}
  {{- if .registers }}
  # Never two at once: each would find the other one's record in NATS.
  strategy: {type: Recreate}
  {{- else }}
  strategy:
    rollingUpdate: {maxUnavailable: 0, maxSurge: 1}
  {{- end }}
  template:
    metadata:
      labels:
        {{- toYaml (merge (fromYaml $selector) $of.podLabels $root.Values.commonLabels) | nindent 8 }}
      {{- with $of.podAnnotations }}
      annotations:
        {{- toYaml . | nindent 8 }}
      {{- end }}
    spec:
      serviceAccountName: {{ include "kvscout.serviceAccount" $root }}
      enableServiceLinks: false
      automountServiceAccountToken: {{ not (empty $reads) }}
      {{- with $root.Values.imagePullSecrets }}
      imagePullSecrets:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- with $of.priorityClassName }}
      priorityClassName: {{ . }}
      {{- end }}
      securityContext:
        {{- include "kvscout.podSecurity" $root | nindent 8 }}
      terminationGracePeriodSeconds: {{ add $of.graceSeconds 15 }}
      containers:
        - name: {{ .name }}
          image: {{ include "kvscout.image" $root }}
          imagePullPolicy: {{ $root.Values.image.pullPolicy }}
          command: {{ .program | default (printf "[kvscout-%s]" .name) }}
          args:
            {{- include "kvscout.flags" . | nindent 12 }}
            {{- .flags | trim | nindent 12 }}
            {{- range $of.args }}
            - {{ . | quote }}
            {{- end }}
          {{- with $of.env }}
          env:
            {{- toYaml . | nindent 12 }}
          {{- end }}
          ports:
            - {name: grpc, containerPort: {{ $of.grpcPort }}}
            - {name: metrics, containerPort: {{ $of.metricsPort }}}
            {{- with .ports }}
            {{- . | trim | nindent 12 }}
            {{- end }}
          {{- include "kvscout.probes" . | nindent 10 }}
          resources:
            {{- toYaml $of.resources | nindent 12 }}
          securityContext:
            {{- include "kvscout.containerSecurity" $root | nindent 12 }}
          {{- with $mounts }}
          volumeMounts:
            {{- . | nindent 12 }}
          {{- end }}
      {{- with $volumes }}
      volumes:
        {{- . | nindent 8 }}
      {{- end }}
      {{- with $of.nodeSelector }}
      nodeSelector:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- with $of.tolerations }}
      tolerations:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- with $of.topologySpreadConstraints }}
      topologySpreadConstraints:
        {{- range . }}
        - {{- toYaml (merge (deepCopy .) (dict "labelSelector" (dict "matchLabels" (fromYaml $selector)))) | nindent 10 }}
        {{- end }}
      {{- end }}
      affinity:
        {{- if $of.affinity }}
        {{- toYaml $of.affinity | nindent 8 }}
        {{- else }}
        podAntiAffinity:
          preferredDuringSchedulingIgnoredDuringExecution:
            - weight: 100
              podAffinityTerm:
                topologyKey: kubernetes.io/hostname
                labelSelector:
                  matchLabels:
                    {{- $selector | nindent 20 }}
        {{- end }}
{{- if and $root.Values.podDisruptionBudget.create (not .registers) }}
---
# One at a time, however many there are now: a single one may always be evicted.
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  name: {{ $name }}
  namespace: {{ $root.Release.Namespace }}
  labels:
    {{- include "kvscout.labels" $root | nindent 4 }}
    app.kubernetes.io/component: {{ .name }}
spec:
  maxUnavailable: 1
  selector:
    matchLabels:
      {{- $selector | nindent 6 }}
{{- end }}
{{- if $scales }}
---
apiVersion: autoscaling/v2
kind: HorizontalPodAutoscaler
metadata:
  name: {{ $name }}
  namespace: {{ $root.Release.Namespace }}
  labels:
    {{- include "kvscout.labels" $root | nindent 4 }}
    app.kubernetes.io/component: {{ .name }}
spec:
  scaleTargetRef: {apiVersion: apps/v1, kind: Deployment, name: {{ $name }}}
  minReplicas: {{ $of.autoscaling.minReplicas }}
  maxReplicas: {{ $of.autoscaling.maxReplicas }}
  metrics:
    - type: Resource
      resource: {name: cpu, target: {type: Utilization, averageUtilization: {{ $of.autoscaling.targetCPUUtilizationPercentage }}}}
  {{- with $of.autoscaling.behavior }}
  behavior:
    {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end }}
{{- end }}
