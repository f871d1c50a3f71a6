package csrpolicy

// Codes of reasons for which a request is left alone.
const (
	CodeOtherSigner = "OtherSigner"    // not kubernetes.io/kubelet-serving
	CodeSettled     = "AlreadySettled" // somebody has approved or denied it, or it was issued or failed
	CodeForeignNode = "ForeignNode"    // the Node does not run Talos, or is not claimed by us
	CodeAbandoned   = "Abandoned"      // no kubelet waits for it any longer
)

// CodeProven is that of the one reason for which a request is approved.
const CodeProven = "MachineProvesAll"

// Codes of reasons for which a request must wait.
const (
	CodeNodeUnknown         = "NodeUnknown"
	CodeMachineUnknown      = "MachineUnknown"
	CodeMachineStale        = "MachineStale"
	CodeMachineMismatch     = "MachineMismatch"
	CodeClusterUnknown      = "ClusterUnknown"          // what is the cluster's own is not known in full
	CodeControlPlaneUnclear = "ControlPlaneUnconfirmed" // the API server's, and Node and machine do not both say control plane
	CodeUnknownName         = "UnknownName"             // the machine does not have that name
	CodeUnknownAddress      = "UnknownAddress"          // the machine does not have that address
	CodeExcludedAddress     = "ExcludedAddress"         // the machine has it and says that it is no node's
	CodeVirtualAddress      = "VirtualAddress"          // it is on a link for addresses that several machines have, and not the node IP
	CodeClaimedByOthers     = "ClaimedByOthers"
)

// Codes of reasons for which a request is denied.
const (
	CodeNoNode           = "RequesterIsNoNode"
	CodeGroups           = "WrongGroups"
	CodeUsages           = "WrongUsages"
	CodeExpiration       = "WrongExpiration"
	CodeTooLarge         = "RequestTooLarge"
	CodeMalformed        = "MalformedRequest"
	CodeSubject          = "WrongSubject"
	CodeKey              = "WeakKey"
	CodeSignature        = "BadSignature"
	CodeExtension        = "ForbiddenExtension" // an attribute or extension other than subjectAltName
	CodeNoSubjects       = "NoSubjects"
	CodeTooManySubjects  = "TooManySubjects"
	CodeForbiddenSubject = "ForbiddenSubject" // neither a DNS name nor an address
	CodeWildcard         = "Wildcard"
	CodeInvalidName      = "InvalidName"
	CodeAddressAsName    = "AddressAsName"
	CodeClusterName      = "ClusterName"
	CodeSpecialAddress   = "SpecialAddress" // loopback, link-local, multicast, unspecified, broadcast
	CodeClusterAddress   = "ClusterAddress"
	CodeOutdated         = "Outdated" // neither the machine nor the Node has it: the kubelet would ask for something else by now
)
