package nodespec

import (
	"fmt"
	"net/netip"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/siderolabs/talos/pkg/machinery/resources/hardware"
	"github.com/siderolabs/talos/pkg/machinery/resources/runtime"

	"github.com/talos-ccm/talos-ccm/pkg/machine"
	"github.com/talos-ccm/talos-ccm/pkg/rules"
)

// Platforms without instance IDs of their own, as Talos names them
// (siderolabs/talos internal/app/machined/pkg/runtime/v1alpha1/platform).
const (
	platformMetal     = "metal"     // the instance ID is the SMBIOS UUID (metal.go), which may be invalid or not unique
	platformContainer = "container" // hostname and SKU only (container.go)
	platformNoCloud   = "nocloud"   // instance-id and the whole data source are optional (nocloud.go)
	platformVMware    = "vmware"    // guestinfo is optional; a configuration is always published (vmware_supported.go)
)

// providerID returns the first of: the providerID of the platform; one made from its instance ID; one made from the SMBIOS
// UUID; one made from the node IP, which is empty if the node IP is the zero value.
func providerID(in Input, nodeIP netip.Addr) string {
	meta, uuid := in.Machine.Platform, in.Machine.UUID()

	switch {
	case isProviderID(meta.ProviderID):
		return meta.ProviderID
	case !in.Options.ProviderIDFromNodeIP && meta.InstanceID != "" && !identifiedBySMBIOS(meta.Platform):
		return providerURI(meta.Platform, meta.InstanceID)
	case !in.Options.ProviderIDFromNodeIP && uuid != "" && len(in.SharedUUID) == 0:
		return providerURI(meta.Platform, uuid)
	case !nodeIP.IsValid():
		return ""
	default:
		return providerURI(meta.Platform, nodeIP.String())
	}
}

// Fields of the metadata that identify the machine, as rules name them.
const (
	fieldProviderID = "ProviderID"
	fieldInstanceID = "InstanceID"
)

// providerIDOfRules returns the providerID that rules set or, where the platform publishes none, the one made from the
// instance ID that rules set; otherwise the untransformed one.
func providerIDOfRules(in Input, transformed rules.Result, untransformed string) string {
	_, providerID := transformed.Replaced[fieldProviderID]
	_, instanceID := transformed.Replaced[fieldInstanceID]

	switch {
	case providerID:
		return transformed.Platform.ProviderID
	case instanceID && !isProviderID(in.Machine.Platform.ProviderID) && !in.Options.ProviderIDFromNodeIP:
		return providerURI(transformed.Platform.Platform, transformed.Platform.InstanceID)
	default:
		return untransformed
	}
}

// identityProblem returns why the providerID or the instance ID that rules set cannot be used, or nil. Then the Node
// gets no other providerID: it could not be corrected later.
func identityProblem(in Input, transformed rules.Result) *Problem {
	_, providerID := transformed.Replaced[fieldProviderID]
	_, instanceID := transformed.Replaced[fieldInstanceID]

	for _, p := range transformed.Problems {
		// A rule may compute an ID from metadata that an earlier rule failed to replace.
		if p.Identity || ((providerID || instanceID) && strings.HasPrefix(p.Key, "platformMetadata[")) {
			return &p
		}
	}

	for _, field := range []struct {
		name, value string
		identifies  bool
	}{
		{fieldProviderID, transformed.Platform.ProviderID, rules.IsProviderID(transformed.Platform.ProviderID)},
		{fieldInstanceID, transformed.Platform.InstanceID, transformed.Platform.InstanceID != ""},
	} {
		rule, replaced := transformed.Replaced[field.name]
		if !replaced {
			continue
		}

		why := invalidID(field.value)

		switch {
		case pendingSMBIOS(in):
			why = "may depend on SMBIOS information that has not been read yet"
		case !field.identifies:
			why = "does not identify an instance"
		case why == "":
			continue
		}

		return &Problem{Rule: rule, Key: "platformMetadata[" + field.name + "]", Value: field.value, Why: "it " + why}
	}

	return nil
}

// identifiedBySMBIOS reports whether the platform's instance ID, if any, is the SMBIOS UUID.
func identifiedBySMBIOS(platform string) bool {
	return platform == platformMetal || platform == platformContainer
}

// pendingFacts returns why facts that identify the machine may be missing, or an empty string.
func pendingFacts(in Input) string {
	if in.AwaitsFacts && in.ProviderID == "" && in.Options.Rules.IdentityFacts() != 0 && in.Machine.Stage != runtime.MachineStageRunning {
		return "the machine is booting, and a rule for the providerID reads facts that it may not have yet"
	}

	return ""
}

// pendingMetadata returns the metadata without which the machine cannot be identified yet, or an empty string.
func pendingMetadata(in Input) string {
	meta := in.Machine.Platform
	identified := meta.InstanceID != "" || isProviderID(meta.ProviderID)

	switch {
	case meta.Platform == "":
		return "the machine has not published its platform yet"
	case identifiedBySMBIOS(meta.Platform):
		// The metadata is watched and SMBIOS is polled, so the UUID may be published before it is read here.
		if meta.InstanceID != "" && in.Machine.System == (hardware.SystemInformationSpec{}) {
			return fmt.Sprintf("the SMBIOS UUID of platform %q has not been read yet", meta.Platform)
		}
	case !isFinal(in.Machine, !in.Machine.PlatformFromCache): // the disk may have belonged to another instance
		return fmt.Sprintf("platform %q has not confirmed the metadata that Talos cached in an earlier boot", meta.Platform)
	case identified:
		if why := invalidID(meta.InstanceID + meta.ProviderID); why != "" {
			return fmt.Sprintf("platform %q has published an invalid instance ID or providerID: it %s", meta.Platform, why)
		}
	case meta.Platform != platformNoCloud && meta.Platform != platformVMware:
		return fmt.Sprintf("platform %q has not published an instance ID yet", meta.Platform)
	case !isFinal(in.Machine, in.Machine.PlatformPublished):
		return fmt.Sprintf("platform %q has not published its metadata yet", meta.Platform)
	}

	return ""
}

// invalidID returns why an instance ID or a providerID is invalid, or an empty string. On nocloud, IDs are free text.
func invalidID(id string) string {
	const longest = 1024 // an Azure resource ID takes some 200

	invalid := func(r rune) bool { return !unicode.IsGraphic(r) || unicode.IsSpace(r) || r == utf8.RuneError }

	switch {
	case len(id) > longest:
		return fmt.Sprintf("is longer than %d bytes", longest)
	case strings.ContainsFunc(id, invalid):
		return "contains spaces, control characters or invalid UTF-8"
	default:
		return ""
	}
}

// isProviderID reports whether providerID identifies an instance. If the metadata lacks the instance ID, Talos
// publishes an incomplete providerID, such as "openstack:///" without a data source, or "aws:///eu-1a/".
func isProviderID(providerID string) bool {
	return providerID != "" && !strings.HasSuffix(providerID, "/")
}

func providerURI(platform, id string) string { return "talos://" + platform + "/" + id }

// isFinal reports whether the platform has published its metadata, or will not do so in this boot. A nocloud machine
// without a data source never publishes a configuration (NetworkConfiguration returns without one), and it will not
// once the machine is running, unless SMBIOS names a data source on the network, which Talos queries until it responds.
func isFinal(m machine.Machine, published bool) bool {
	isRunningNoCloud := m.Platform.Platform == platformNoCloud && m.Stage == runtime.MachineStageRunning

	return published || (isRunningNoCloud && !hasNetworkSeed(m.System.SerialNumber))
}

// pendingSMBIOS reports whether the SMBIOS information may still be missing. Talos publishes it long before a machine
// is running, and it is polled together with the stage.
func pendingSMBIOS(in Input) bool {
	return in.Machine.System == (hardware.SystemInformationSpec{}) && in.Machine.Stage != runtime.MachineStageRunning
}

// hasNetworkSeed reports whether the SMBIOS serial number makes Talos read nocloud metadata from the network instead
// of a drive: "ds=nocloud-net;s=http://10.0.0.254/" (nocloud/metadata.go).
func hasNetworkSeed(serial string) bool {
	var network, http bool

	for option := range strings.SplitSeq(serial, ";") {
		switch key, value, _ := strings.Cut(option, "="); key {
		case "ds":
			network = network || value == "nocloud-net"
		case "s":
			http = http || strings.HasPrefix(strings.ToLower(value), "http")
		}
	}

	return network && http
}
