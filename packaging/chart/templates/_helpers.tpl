{{- define "talos-ccm.selectorLabels" -}}
app.kubernetes.io/name: talos-ccm
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "talos-ccm.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{ include "talos-ccm.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end -}}

{{- /* Nine tenths of the memory limit, because the kernel also counts memory that Go's runtime does not know. */ -}}
{{- define "talos-ccm.goMemLimit" -}}
{{- $limit := dig "limits" "memory" "" (.Values.resources | default dict) | toString -}}
{{- $unit := regexFind "[A-Za-z]*$" $limit -}}
{{- $bytes := dict "" 1 "k" 1000 "M" 1000000 "G" 1000000000 "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 -}}
{{- if $limit }}{{ mulf 0.9 (get $bytes $unit) (trimSuffix $unit $limit) | int64 }}{{ else }}1GiB{{ end -}}
{{- end -}}
