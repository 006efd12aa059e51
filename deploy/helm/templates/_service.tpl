{{- /* Flags and volumes that every service has. Context: root, name (of the service), of (its values). */ -}}
{{- define "kvscout.flags" -}}
- --host=0.0.0.0
- --port={{ .of.grpcPort }}
- --metrics-port={{ .of.metricsPort }}
- --grace-seconds={{ .of.graceSeconds }}
- --log-level={{ .root.Values.logging.level }}
- --log-format={{ .root.Values.logging.format }}
{{- if .of.maxConnectionAgeSeconds }}
- --max-connection-age-seconds={{ .of.maxConnectionAgeSeconds }}
{{- end }}
{{- range fromJsonArray (include "kvscout.selections" .root) }}
- {{ printf "--workers-k8s=%s" . | quote }}
{{- end }}
{{- with .root.Values.auth }}
{{- if .secret }}
- --auth-tokens=/etc/kvscout/auth/tokens.yaml
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

{{- /* The kubelet's grpc probe speaks no TLS. */ -}}
{{- define "kvscout.probe" -}}
{{- if .root.Values.tls.secret }}
tcpSocket: {port: grpc}
{{- else }}
grpc: {port: {{ .of.grpcPort }}}
{{- end }}
{{- end }}

{{- /* The Deployment and the PodDisruptionBudget of one service. Context: root, name, of, flags, ports, volumes, mounts. */ -}}
{{- define "kvscout.service" -}}
{{- $root := .root }}
{{- $of := .of }}
{{- $name := printf "%s-%s" (include "kvscout.name" $root) .name }}
{{- $reads := fromJsonArray (include "kvscout.selections" $root) }}
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
  replicas: {{ $of.replicas }}
  selector:
    matchLabels:
      {{- include "kvscout.selector" $root | nindent 6 }}
      app.kubernetes.io/component: {{ .name }}
  strategy:
    rollingUpdate: {maxUnavailable: 0, maxSurge: 1}
  template:
    metadata:
      labels:
        {{- include "kvscout.labels" $root | nindent 8 }}
        app.kubernetes.io/component: {{ .name }}
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
      securityContext:
        runAsNonRoot: true
        runAsUser: 65532
        runAsGroup: 65532
        fsGroup: 65532
        seccompProfile: {type: RuntimeDefault}
      terminationGracePeriodSeconds: {{ add $of.graceSeconds 15 }}
      containers:
        - name: {{ .name }}
          image: {{ printf "%s:%s" $root.Values.image.repository ($root.Values.image.tag | default $root.Chart.AppVersion) | quote }}
          imagePullPolicy: {{ $root.Values.image.pullPolicy }}
          command: [kvscout-{{ .name }}]
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
          # Until the workers are known, or for a few seconds: then it serves without them.
          startupProbe:
            {{- include "kvscout.probe" . | trim | nindent 12 }}
            periodSeconds: 2
            failureThreshold: 60
          readinessProbe:
            {{- include "kvscout.probe" . | trim | nindent 12 }}
            periodSeconds: 5
            failureThreshold: 2
          livenessProbe:
            {{- include "kvscout.probe" . | trim | nindent 12 }}
            periodSeconds: 10
            timeoutSeconds: 5
            failureThreshold: 6
          # Whoever still has its address finds it until its removal from the service has come round.
          lifecycle:
            preStop: {sleep: {seconds: 5}}
          resources:
            {{- toYaml $of.resources | nindent 12 }}
          securityContext:
            allowPrivilegeEscalation: false
            readOnlyRootFilesystem: true
            capabilities: {drop: [ALL]}
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
                    {{- include "kvscout.selector" $root | nindent 20 }}
                    app.kubernetes.io/component: {{ .name }}
        {{- end }}
{{- if and $root.Values.podDisruptionBudget.create (gt (int $of.replicas) 1) }}
---
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
      {{- include "kvscout.selector" $root | nindent 6 }}
      app.kubernetes.io/component: {{ .name }}
{{- end }}
{{- end }}
