// Package extension holds the files that make talos-ccm a Talos system extension.
package extension

import _ "embed"

// Name is the extension's and its service's; Talos calls the service "ext-talos-ccm".
const Name = "talos-ccm"

// RBAC is what talos-ccm may do in Kubernetes: a stream of YAML documents.
//
//go:embed rbac.yaml
var RBAC []byte

// ServiceAccount and Namespace name the account of RBAC.
const (
	ServiceAccount = "talos-ccm"
	Namespace      = "kube-system"
)

// Spec is the service spec as Talos reads it from /usr/local/etc/containers.
//
//go:embed talos-ccm.yaml
var Spec []byte
