package docs_test

import (
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// threat is an attempt of an attacker in docs/explanation/threat-model.md, and the tests of its result.
type threat struct{ attempt, tests string }

// threats has the rows of the page, in that order, by attacker.
var threats = map[string][]threat{
	"Root on a worker": {
		{"get a certificate for names and addresses of the machine", "TestController_ApprovedRequestsAreIssued"},
		{"block other machines' new certificates by reporting their names and addresses", "TestController_DefersAddressOfTwoMachines"},
		{"get another machine's name or address (upstream: GHSA-87pw-5j2g-6376)", "TestController_NeverApprovesAttacks"},
		{
			"get it by listing it in the Node, or by reporting it through the Talos API",
			"TestController_DefersAddressListedByAnotherNode TestController_DefersWhatLyingMachineReports",
		},
		{"get it by taking the address of a machine that is down", "TestController_DefersAddressOfImpersonatedMachine"},
		{"get that machine's other names and addresses by responding under its name", "TestClaims_OfWhatMachineStoppedToReport"},
		{"get it after the machine's Node was deleted", "TestController_KeepsAddressesOfDeletedNode"},
		{
			"the same, with a new Node of that name",
			"TestController_KeepsAddressesOfReregisteredNode TestClaims_KeepNothingFromMachineThatReturned TestClaims_ReleaseNodenameOfDeletedWorker",
		},
		{"take another machine's ExternalIP from its Node, outside Azure", "TestController_KeepsAddressThatAnotherMachineReports"},
		{
			"have another machine's new ExternalIP, or any of its DNS names, omitted from its Node, by reporting it",
			"TestDesired_OmitsSharedAddresses TestController_OmitsNamesWhileShared",
		},
		{
			"have an address listed, certified or published by forging what the template of a [rule](../reference/rules.md#addresses) reads",
			"TestRuleAddresses_AreInTheCIDRsOfTheRule TestRuleAddresses_ArePublishedWithinExternalCIDRs",
		},
		{"the same, for many addresses, to keep them from other Nodes", "TestClaims_ReserveRuleAddresses"},
		{
			"the same, with an address that a rule set for another Node or that is in its record, also while its machine is down or after a change of leader",
			"TestRuleAddresses_BelongToOneNode TestClaims_OfRuleAddresses TestPolicyFor_AllowsNamesAndAddressesThatTheNodeHas",
		},
		{"free such an address by responding for the other Node", "TestRuleAddresses_AreNotFreedByAnotherMachine"},
		{
			"become an owner of the label that records such an address, to keep the address after the rule has changed",
			"TestMakePlan_RemovesRecordsThatKubeletOwnsToo TestRuleAddresses_OfNodeControllerAlone",
		},
		{
			"change a new machine's providerID by reporting its SMBIOS UUID",
			"TestController_IgnoresUUIDThatInitializedNodeDoesNotHave TestController_IgnoresUUIDOfNodeThatWasNotInitializedWithIt",
		},
		{
			"get the name of a Service, such as `vault.vault`, or the address of a Service or pod",
			"TestController_DeniesNamesOfServices TestPools_BelongToNoKubelet",
		},
		{
			"set labels of its Node that its kubelet may not, by reporting tags for [`labelsFromTags`](../reference/rules.md#labels-from-tags)",
			"TestController_FollowsTagsWithinPrefix TestApply_SetsLabelsFromTags TestApply_BoundsLabelsFromTags",
		},
		{"evade checks by letter case, wildcards, look-alikes or malformed data", "TestReview_ApprovesNoHostileRequest"},
		{"receive the cluster's traffic to a foreign address, which Services publish as its ExternalIP", "TestDecide_Addresses"},
		{
			"receive the traffic to the cluster endpoint, a control-plane machine, a Service or a pod, by reporting its address",
			"TestDecide_OmitsAddressesThatAWorkerCannotHave",
		},
		{"the same while the leader does not know the cluster's addresses", "TestDecide_AddsNoAddressUntilTheClusterIsKnown"},
		{"stop all Services with an address on the link `kube-ipvs0`", "TestDecide_IPVSCountsOnlyForTheNodeItself"},
		{"delay all controllers with thousands of addresses that change", "TestView_LimitsAddressesExceptThoseOfServices"},
		{"exhaust the memory of a control-plane machine", "TestProcess_ExitsAboveItsMemoryCeiling"},
		{
			"take the memory or CPU of the leader's machine with what the COSI client decodes slowly",
			"TestDial_RefusesWhatExceedsLimits TestDial_RefusesEmptyEvents FuzzMachine_SendsAnything",
		},
		{"the same, by changes without end", "TestBounds_LimitChangesPerMinute TestSession_MachineThatExceedsLimitsIsUnreachable"},
		{"the same, by breaking its connections without end", "TestReflector_DialsMachineWithShortSessionsLessOften"},
		{"fill its memory with long errors or common identities", "TestSession_ShortensErrorsOfMachines TestInventory_ForgetsIdentifierOfSeveralMachines"},
	},
	"Credentials of a kubelet": {
		{"get a certificate with its own key for what the machine has", "TestController_ApprovedRequestsAreIssued"},
		{
			"block new certificates of other machines by listing what they have",
			"TestController_IgnoresClaimsThatMachineContradicts TestClaims_OfDeletedNodes",
		},
		{"evade checks by reporting another operating system", "TestController_ChecksNodeThatStopsReportingTalos"},
		{
			"have the Node deleted or tainted while its machine is down, by announcing a reset or a shutdown, or with a new name",
			"TestController_Histories TestDoubt_AnnouncementCountsOnlyFromRecordedMachineAtItsAddress TestSession_KeepsVolumeOfMachineThatIsReset",
		},
		{"the same, to register the Node without an administrator's restricted label or taint", "TestController_Histories"},
		{
			"delay new machines with many Nodes at one stalling address",
			"TestReflector_ConnectsWhileManyNodesStallAtOneAddress TestReflector_LimitsSessionsAtOneAddress",
		},
		{"change the recorded client certificate", "TestPinning_KubeletCannotWriteLabels"},
		{
			"stop pod CIDR allocation, or take a whole pool",
			"TestController_AllocatesDespiteKubeletThatWritesPodCIDRs TestController_AllocatesDespiteKubeletThatRegistersWithTheWholePool",
		},
		{
			"control-plane Node: have the attacker's machine dialed, and get the cluster endpoint's certificate",
			"TestController_DeniesRequestOfControlPlaneImpostor",
		},
		{"control-plane Node: get its machine's translated address (1:1 NAT) for another machine", "TestReader_ReadsTheCertificatesOfAllEndpoints"},
		{"control-plane Node: have the CSRs of all kubelets denied", "TestController_IgnoresPodCIDRsOfControlPlaneImpostor"},
	},
	"Bootstrap token and pinning": {
		{
			"register a control-plane machine's Node before it joins, and get the cluster endpoint's certificate",
			"TestController_DropsImpostorOnceNodeIsLabeled",
		},
		{"get the certificate of an existing worker (default: `warn`)", "TestPinning_Warns"},
		{"get the certificate of a worker with `enforce`", "TestPinning_DefersBootstrapTokenForExistingNode"},
		{
			"get the certificate of a control-plane machine (default: `enforce`)",
			"TestPolicyFor_EnforcesCredentialsOfControlPlaneByDefault TestServingCertificates_AreNotIssuedToBootstrapToken",
		},
		{
			"get the certificate of an enforced Node after the Node was deleted and has registered again",
			"TestPinning_RecordOutlivesNode TestLeader_KeepsCertificateOfMachineAfterDeletion TestStatement_OutlastsNode",
		},
		{
			"get the certificate of an enforced Node faster than a wiped or reinstalled machine's kubelet",
			"TestPinning_AcceptsReinstalledMachine TestReview_RecordsForControlPlaneWhatItsMachineStated",
		},
		{"get the certificate of any Node after the token was deleted", "TestPinning_DeletedBootstrapTokenIsOfNoUse"},
		{
			"control-plane Node without a record when talos-ccm is installed: get its certificate with a client certificate older than an hour",
			"TestStatement_CertificateOfUnknownOriginIsNotRecorded",
		},
		{
			"control-plane Node: get its certificate with a record made before the Node had the label of the control plane",
			"TestStatement_RecordOfWorkerDoesNotCountForControlPlane",
		},
		{"take the leader's memory with thousands of Nodes whose machines have not answered before", "TestReflector_LimitsWhatMachinesOfUnknownNodesSend"},
		{"delay the machines of known Nodes with thousands of Nodes", "TestReflector_ConnectsToKnownNodesWhileMachinesOfOthersStall"},
		{"the same, with root on a worker that answers for each of them once", "TestReflector_ConnectsWhileManyMachinesStall"},
		{"delay certificates after a change of leader with a machine that stalls", "TestController_NewLeaderApprovesRecordedAddresses"},
		{
			"keep a new machine's Node uninitialized, or change its providerID, with a Node that has the providerID",
			"TestController_IgnoresProviderIDThatKubeletRegistered",
		},
		{"the same, with root on a worker that responds for that Node", "TestController_UUIDOfPendingNodeOnlyDelays TestController_NeverAssignsProviderIDOfKnownNode"},
		{"stop the deletion of Nodes with more Nodes than there are machines", "TestController_Histories"},
		{"the same, to keep `TalosReady` from becoming Unknown", "TestConditions_MostMachinesRespondUnlessMoreThanHalfAreUnreachable"},
		{
			"keep an address of a [rule](../reference/rules.md#addresses) from its Node, with a Node that lists it",
			"TestRuleAddresses_OfNodeControllerAlone TestClaims_ReserveRuleAddresses",
		},
		{"have an operator accept its certificate", "TestPinning_Warns"},
		{"get the certificate of an enforced Node with a machine of its own to which it moves the Node", "TestPinning_KeepsRecordDespiteImpostor"},
		{
			"control-plane machine with the extension: get its certificate with a machine that takes its address for some seconds (ARP spoofing)",
			"TestStatement_OutlastsMachineAtItsAddress TestTakeover_OfControlPlaneAddressGainsNoCertificate",
		},
		{
			"after a change of leader, get an address that another machine reports too, while that machine does not answer",
			"TestController_NewLeaderApprovesRecordedAddresses",
		},
		{
			"get the address of a machine that is down, whose Node it empties or has another machine answer for, also after a change of leader",
			"TestController_KeepsRecordedAddressesOfMachineThatIsDown TestClaims_OfRecordedAddresses",
		},
	},
	"Others": {
		{"user of one namespace: delay the addresses of all Services with many ports or long node selectors", "TestDecide_LimitsPortsAndSelectors"},
		{"pod in the host network: respond as a machine, without a certificate for its address", "TestDial_RejectsCertificateOfAnotherAddress"},
		{"pod in the host network of a control-plane machine: read metrics without an authorized token", "TestMetrics_RequireAuthorization"},
		{"the same: listen on the secure port first, to stop the controllers", "TestManager_LeadsWithoutSecurePort"},
		{"the same, to receive the tokens of clients", "TestMetrics_RequireAuthorization"},
		{"reader of the log: find tokens or keys, at any verbosity", "TestProcess_NeverLogsCredentials"},
		{
			"client that may create EndpointSlices in `default`: have CSRs of workers wait, or the leader connect anywhere",
			"TestReader_IgnoresEndpointSlicesOfOthers",
		},
		{"reader of the Kubernetes API: find the admin credentials that talos-ccm starts with", "TestBootstrap_NeverWritesAdminCredentials"},
		{"client that may create CSRs: get a certificate", "TestReview_ApprovesNoHostileRequest"},
	},
}

// TestThreatModel_RowsHaveTests checks that each attempt on the page has tests here, which exist.
func TestThreatModel_RowsHaveTests(t *testing.T) {
	_, attackers, found := strings.Cut(read(t, "docs/explanation/threat-model.md"), "\n## Attackers\n")
	require.True(t, found)

	attackers, _, _ = strings.Cut(attackers, "\n## ")
	_, tests := sources(t)
	row := regexp.MustCompile(`(?m)^\| (.+) \| .+ \|$`)
	attempts := map[string][]string{}

	for section := range strings.SplitSeq(attackers, "\n### ") {
		attacker, table, _ := strings.Cut(section, "\n")

		for _, match := range row.FindAllStringSubmatch(table, -1) {
			if match[1] != "attempt" {
				attempts[attacker] = append(attempts[attacker], match[1])
			}
		}
	}

	for attacker, rows := range threats {
		var known []string

		for _, threat := range rows {
			known = append(known, threat.attempt)

			for name := range strings.FieldsSeq(threat.tests) {
				assert.True(t, strings.Contains(tests, "func "+name+"("), "%s: test %s does not exist", threat.attempt, name)
			}
		}

		assert.Equal(t, attempts[attacker], known, "rows of %s", attacker)
		delete(attempts, attacker)
	}

	assert.Empty(t, attempts, "attackers without tests")
}
